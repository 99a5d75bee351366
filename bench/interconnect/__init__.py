"""Messages and collectives: what they cost between the ranks of a training layout."""
