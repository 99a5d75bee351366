"""Pipeline schedules as data: made (schedules), proved (check), timed (simulate), drawn (draw).

One engine runs any of them.
"""
