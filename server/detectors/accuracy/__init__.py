"""The family of the accuracy."""
