"""Tokens, and whose runs a request may see."""
