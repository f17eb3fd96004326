"""The other rank of a two-rank gloo job, which comes to each collective when it is told to."""

import datetime

import torch

TIMEOUT = datetime.timedelta(seconds=60)


def join(store, rank):
    """Makes this process a rank of the job."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=TIMEOUT
    )


def come_when_told(store, told, collectives):
    """Rank 1: one all-reduce for each time that `told` is released."""
    join(store, 1)
    for _ in range(collectives):
        if not told.acquire(timeout=TIMEOUT.total_seconds()):
            raise TimeoutError("was never told")
        torch.distributed.all_reduce(torch.ones(1))
    torch.distributed.destroy_process_group()
