"""What comes from outside: files that users hand in, read within bounds, and text made harmless."""
