"""The demo: a real training run on several processes, broken midway, found while one watches."""
