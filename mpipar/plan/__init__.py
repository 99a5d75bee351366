"""What a layout will cost: costs of passes, and what is predicted from them."""
