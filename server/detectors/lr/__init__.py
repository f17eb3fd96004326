"""The family of the learning rate."""
