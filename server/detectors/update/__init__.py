"""Steps that do not do what a step should."""
