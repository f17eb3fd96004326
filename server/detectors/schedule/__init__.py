"""The schedule of the learning rate."""
