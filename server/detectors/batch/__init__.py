"""How many samples a step needs."""
