"""The wire: grid, groups, transports, and a record of every call. Data moves only here."""
