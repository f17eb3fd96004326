"""Mixed precision: the scale of the loss."""
