"""The wire: grid, groups, transports, and the record of every call. Only here does data move."""
