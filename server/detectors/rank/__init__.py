"""The family of single ranks that fall out of line: one kind a module."""
