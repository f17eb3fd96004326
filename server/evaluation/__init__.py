"""The evaluation of runs: align what came, compare, detect, keep."""
