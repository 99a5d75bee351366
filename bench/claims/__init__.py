"""What textbooks say about partitioned training, one table each."""
