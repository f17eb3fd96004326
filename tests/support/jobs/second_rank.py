"""The other rank of a two-rank gloo job, which comes to each collective at a signal."""

import datetime

import torch

TIMEOUT = datetime.timedelta(seconds=60)


def join(store, rank):
    """Makes this process a rank of the job."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=TIMEOUT
    )


def come_when_signalled(store, signal, collectives):
    """Rank 1: one all-reduce for each time that `signal` is released."""
    join(store, 1)
    for _ in range(collectives):
        if not signal.acquire(timeout=TIMEOUT.total_seconds()):
            raise TimeoutError("no signal came")
        torch.distributed.all_reduce(torch.ones(1))
    torch.distributed.destroy_process_group()
