"""Ranks against each other, step by step: equality, conservation, distance. Pure."""
