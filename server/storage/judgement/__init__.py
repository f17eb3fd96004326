"""What the evaluation reads and leaves: comparisons, alerts, states, leases, messages."""
