"""Lives of runs, from training to generation, over all combinations of choices, against one rank."""
