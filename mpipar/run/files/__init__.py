"""Safe reading of user-supplied files, safe writing of a run's files, escaping of foreign text."""
