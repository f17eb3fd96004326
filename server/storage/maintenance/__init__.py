"""Roll-ups, merging, deletion, back-up, search for damage."""
