"""Ranks that print what they do, a secret among it, until the server has found something.

RANK=0 WORLD_SIZE=2 python printing_job.py
"""

import logging
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from rankscope import agent

BREAKS, MOST = 30, 100_000


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(stream=sys.stderr)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    deadline = time.monotonic() + 120
    with agent.attach(model, optimizer, config={"data": {"name": "digits"}}) as monitor:
        heard = []
        monitor.on_alert(heard.append, severity="critical")
        for step in range(MOST):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean()
            if step >= BREAKS:
                loss = loss / 0
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            print(f"rank {rank} is at step {step}")
            if step % 10 == 0:
                logging.warning("API_KEY=abcd-efgh-ijkl is what rank %d reads with", rank)
            leave = torch.tensor(bool(heard) or time.monotonic() > deadline, dtype=torch.int32)
            dist.all_reduce(leave)
            if leave and step > BREAKS + 5:
                break
            time.sleep(0.02)
        time.sleep(8)  # every rank asks for alerts every 5 s
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
