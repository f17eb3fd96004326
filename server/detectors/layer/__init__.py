"""Single layers that no longer take part."""
