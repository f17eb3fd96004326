"""A loop without a step of the optimizer: `unstepped_job.py HOW`, one rank a process.

HOW is "no step" (it calls `zero_grad` and `backward`, and is over soon), "no more" (the same after
40 steps), "no step yet" (as the first, for ever), "by hand" (as the first, and it changes the
parameters itself), "accumulates" (its first step comes after 64 micro-batches, and takes 12 s), or
"fails" (it raises before its first step).
"""

import sys
import time

import torch
from torch import nn
from torch.nn import functional

from rankscope import agent

HOW = sys.argv[1]


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = agent.attach(model, optimizer)
    passes = {"no step yet": 10**9, "no more": 100, "accumulates": 128, "fails": 20}.get(HOW, 30)
    for number in range(passes):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(16, 8, generator=generator)
        loss = functional.cross_entropy(model(x), x[:, :4].argmax(dim=1))
        if HOW == "accumulates":
            (loss / 64).backward()
            time.sleep(12 / 64 if number < 64 else 0)
            if number % 64 == 63:
                optimizer.step()
                optimizer.zero_grad()
            continue
        optimizer.zero_grad()
        loss.backward()
        monitor.log(margin=float(loss))
        if HOW == "no more" and number < 40:
            optimizer.step()
        if HOW == "by hand":
            for parameter in model.parameters():
                parameter.data -= 0.1 * parameter.grad
        time.sleep(0.02)
    if HOW == "fails":
        raise RuntimeError("no more")
    monitor.close()


if __name__ == "__main__":
    main()
