"""Gradients that are not what they should be on any rank."""
