"""Buffers of the model; whether ranks hold the same ones is the family `desync`."""
