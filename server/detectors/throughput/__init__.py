"""The family of the throughput: how fast the whole run goes, by its own past."""
