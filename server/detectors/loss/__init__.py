"""The family of the loss: one kind a module."""
