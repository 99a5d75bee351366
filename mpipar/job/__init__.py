"""The process: session, guard, signals, watchdog, environment, and what a failure leaves behind."""
