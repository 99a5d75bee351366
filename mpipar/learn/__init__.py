"""For learners: worked examples of partitioned layers, with real numbers."""
