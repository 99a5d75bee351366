"""Lives of runs, from training to text, over pairs of all choices, against one plain rank."""
