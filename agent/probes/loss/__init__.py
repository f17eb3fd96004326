"""Losses, accuracy and evaluations, and what the loss functions are given."""
