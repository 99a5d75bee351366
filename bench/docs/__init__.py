"""The pages: everything in README.md and docs/ that a program knows is written here and checked."""
