"""The parts of `benchmarks/agent/__main__.py`: workloads, arms, blocks, figures."""
