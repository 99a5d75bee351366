"""What a layout will cost, and which one to choose: cost models, predictions and a search."""
