"""The sub-commands; each is imported only when it is the one that was typed."""
