"""What the modules of a model make of a batch: outputs, layers, modes, non-finite values."""
