"""A run: what it starts from, its folder, its loop and its report."""
