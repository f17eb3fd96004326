"""Batches on their way into the tables."""
