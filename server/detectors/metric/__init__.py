"""Questions that are asked of every recorded series, whatever its name."""
