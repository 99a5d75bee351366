"""The sub-commands; mpipar imports only the one that the user typed."""
