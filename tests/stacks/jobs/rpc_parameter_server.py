"""An asynchronous parameter server over `torch.distributed.rpc`."""

import os
import threading

import torch.distributed as dist
from torch.distributed import rpc

from tests.stacks import faults
from tests.stacks.jobs.async_parameter_server import FAULTS, Model

LAUNCH = "torchrun"
WORLD = 4
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


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
        self.lock = threading.Lock()
        self.left = threading.Semaphore(0)


def _pull():
    serving = Serving.now
    with serving.lock:
        return serving.watch.version, serving.model.flat()


def _push(worker, version, flat):
    serving = Serving.now
    with serving.lock:
        serving.model.apply_push(serving.watch, worker, version, flat)
        return serving.watch.version < serving.model.length


def _leave():
    Serving.now.left.release()


class Calls(Model):
    """Remote calls, which the server's threads take one after the other."""

    def serve(self, watch):
        serving = Serving.now = Serving(self, watch)
        dist.barrier()
        for _ in range(self.world - 1):
            serving.left.acquire()
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
        rpc.rpc_sync("rank0", _leave)


CASES = faults.cases(Calls, *FAULTS)
