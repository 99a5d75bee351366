"""The page generator: writes into the pages whatever a program can compute or print."""
