"""For learners: worked examples with real numbers, exercises, and the checks that judge answers."""
