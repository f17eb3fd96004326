"""What a step costs: time, waiting, memory."""
