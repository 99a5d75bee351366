"""The pages, the programs that they show, and the generator of their parts."""
