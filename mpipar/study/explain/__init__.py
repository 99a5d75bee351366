"""What one rank does in a step: the step on shapes, and closed forms to compare it with."""
