"""Gradients: of one rank alone, reduced, clipped, applied, left over."""
