"""What a layout will cost: the costs of passes, and the predictions that follow from them."""
