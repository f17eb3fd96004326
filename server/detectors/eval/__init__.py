"""Values that are measured beside the training."""
