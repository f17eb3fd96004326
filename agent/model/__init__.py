"""What can be read off a model and its optimizer: names, tensors, configuration."""
