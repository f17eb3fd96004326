"""The clipping of gradients."""
