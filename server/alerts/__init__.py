"""From findings to alerts: one place that opens, updates, links and resolves."""
