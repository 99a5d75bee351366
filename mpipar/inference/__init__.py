"""What a trained model does: it continues text, and names the class of an image."""
