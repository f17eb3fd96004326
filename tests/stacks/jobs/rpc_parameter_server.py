"""An asynchronous parameter server over `torch.distributed.rpc`, with bounded staleness.

A worker that is ahead of the slowest by more than a few pushes waits for it ("stale synchronous
parallel": Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", NeurIPS 2013). Without a bound, the machine may serve one worker's calls so late that it
sleeps through the steps at which a case breaks it.
"""

import os
import threading

import torch.distributed as dist
from torch.distributed import rpc

from tests.stacks import faults
from tests.stacks.jobs.async_parameter_server import FAULTS, Model

LAUNCH = "torchrun"
WORLD = 4
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]

# Pushes that a worker may be ahead of the slowest.
AHEAD = 3


def begin():
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    rank = faults.begin()
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=WORLD, rpc_timeout=120)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=WORLD, rpc_backend_options=options)
    return rank


class Serving:
    """What the workers call, on the server; there is one in its process."""

    now = None

    def __init__(self, model, watch):
        self.model, self.watch = model, watch
        self.changed = threading.Condition()
        # Pushes of each worker that is there.
        self.clocks = dict.fromkeys(range(1, model.world), 0)

    @property
    def goes_on(self):
        return self.watch.version < self.model.length

    def may_go_on(self, worker):
        return self.clocks[worker] - min(self.clocks.values()) <= AHEAD or not self.goes_on


def _pull():
    serving = Serving.now
    with serving.changed:
        return serving.watch.version, serving.model.flat()


def _push(worker, version, flat):
    serving = Serving.now
    with serving.changed:
        serving.model.apply_push(serving.watch, worker, version, flat)
        serving.clocks[worker] += 1
        serving.changed.notify_all()
        serving.changed.wait_for(lambda: serving.may_go_on(worker))
        return serving.goes_on


def _leave(worker):
    serving = Serving.now
    with serving.changed:
        del serving.clocks[worker]
        serving.changed.notify_all()


class Calls(Model):
    """Remote calls, which the server's threads take one after the other."""

    def serve(self, watch):
        serving = Serving.now = Serving(self, watch)
        dist.barrier()
        with serving.changed:
            serving.changed.wait_for(lambda: not serving.clocks)
        dist.barrier()

    def work(self, watch):
        # Nobody calls before the server is there.
        dist.barrier()
        super().work(watch)
        dist.barrier()

    def pull(self):
        version, flat = rpc.rpc_sync("rank0", _pull)
        self.take(flat)
        return version

    def push(self, version, gradient):
        return rpc.rpc_sync("rank0", _push, args=(self.rank, version, gradient))

    def leave(self):
        rpc.rpc_sync("rank0", _leave, args=(self.rank,))


CASES = faults.cases(Calls, *FAULTS)
