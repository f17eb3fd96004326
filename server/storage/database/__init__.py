"""What lies below every query: engines, dialects, migration, partitions, packed arrays."""
