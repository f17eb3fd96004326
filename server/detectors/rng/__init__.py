"""The random numbers that ranks draw."""
