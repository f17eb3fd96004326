"""The pages that show runs, per-rank curves and the diagnosis in a browser."""
