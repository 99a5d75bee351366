"""One rank's work: worker and step, gradient sums, optimizers, the proof against one rank."""
