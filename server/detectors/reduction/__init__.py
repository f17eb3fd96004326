"""What the reduction of gradients gave, beside what went into it."""
