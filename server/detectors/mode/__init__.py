"""How the modules are set: in training or in evaluation mode, and by their arguments."""
