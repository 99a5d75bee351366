"""Using a trained model: text generation and image classification."""
