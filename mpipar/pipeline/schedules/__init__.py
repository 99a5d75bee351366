"""Pipeline schedules as pure data, one file per family; `catalog` makes each of them by name."""
