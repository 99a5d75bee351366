"""The generator of the pages: what a program knows is never typed into them."""
