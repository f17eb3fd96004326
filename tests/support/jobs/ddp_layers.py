"""Trains under DistributedDataParallel with a hook that compresses, or with a layer cut off.

Arguments: the server's URL, the run, and the hook: `few` (random elements of a bucket), or
`half` (16 bits; the layers before the head are cut off on the way). RANK and WORLD_SIZE as
everywhere.
"""

import sys

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from rankscope import agent
from tests.support.jobs.ending import end_at_once

STEPS, CUT = 60, 40


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(20, 40)
        self.act = nn.ReLU()
        self.second = nn.Linear(40, 30)
        self.head = nn.Linear(30, 5)
        self.cut = False

    def forward(self, x):
        x = self.second(self.act(self.first(x)))
        # DDP waits for every gradient: a part is cut off by a factor of 0.
        return self.head(x.detach() + 0 * x if self.cut else x)


def few(state, bucket):
    """Reduces the mean, and keeps one element of fifty, drawn alike on all ranks."""

    def shorten(future):
        mean = future.value()[0].div_(torch.distributed.get_world_size())
        return mean * (torch.rand(len(mean), generator=state) < 0.02)

    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(shorten)


def main():
    server, run, hook = sys.argv[1:]
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    if hook == "few":
        model.register_comm_hook(torch.Generator().manual_seed(0), few)
    else:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    random = torch.Generator().manual_seed(rank)
    with agent.attach(model, optimizer, server=server, run=run, overhead=1.0) as monitor:
        # As the server asks for it: everything, at every step.
        monitor._schedule.ask_dense(10**9)
        for step in range(STEPS):
            net.cut = step >= CUT and hook == "half"
            x = torch.randn(32, 20, generator=random)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
            optimizer.step()
    torch.distributed.destroy_process_group()
    end_at_once()


if __name__ == "__main__":
    main()
