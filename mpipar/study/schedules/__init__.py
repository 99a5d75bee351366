"""Pipeline schedules simulated, drawn and compared with closed formulas; no step needs this."""
