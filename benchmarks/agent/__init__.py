"""The parts of `benchmarks/agent.py`: workloads, arms, blocks, figures."""
