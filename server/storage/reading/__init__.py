"""Runs, series and layers, as routes and pages read them."""
