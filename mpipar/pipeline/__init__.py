"""Pipeline schedules as data: made (schedules), proved (check), run by one engine."""
