"""What a trained model does: text, and the class of an image."""
