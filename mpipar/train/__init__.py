"""One rank's training: worker and step, gradient sums, optimizers, the proof against one rank."""
