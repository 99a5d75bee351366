"""Pipeline schedules as data: made (schedules), proved (check), timed (simulate), drawn (draw) and run (engine)."""
