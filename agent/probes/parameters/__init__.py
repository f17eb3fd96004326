"""Parameters and buffers: trained, frozen, written by something else."""
