"""What a step is trained on: batches, their rows, random states."""
