"""Lives of runs, training to generation, over all combinations of choices, against one rank."""
