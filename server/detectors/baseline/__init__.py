"""A run beside earlier runs of its project, at equal steps."""
