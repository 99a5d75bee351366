"""Pipeline schedules as pure data, one file per family; `table` names them all."""
