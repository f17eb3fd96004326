"""What makes a step of a gradient: settings, schedule, state, precision, skipped steps."""
