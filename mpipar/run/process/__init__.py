"""The life of a process: session, guard, signals, watchdog, environment, and failure reports."""
