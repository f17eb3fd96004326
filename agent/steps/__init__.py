"""One training step as the agent follows it: hooks, the count, what is read when."""
