"""What compressing gradients costs."""
