"""Planted bugs: the program with one function replaced, which a check must find."""
