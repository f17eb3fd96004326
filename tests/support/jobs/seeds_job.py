"""Small classifiers on data with noisy labels, one after the other: `RUN:SEED:KIND[:STEPS]` each.

A further model of a process is a run of its own, whose id is given here.
"""

import sys
import time

import torch
from torch import nn
from torch.nn import functional

from rankscope import agent

STEPS, BATCH, EVERY = 160, 256, 40
FEATURES, CLASSES = 16, 4
# Steps are so long that the load of the machine hardly matters: those of 4 ms took twice as long
# now and then, whatever else it had to do.
LOADING_S, LOADING_SLOWLY_S = 0.01, 0.08


# Share of the labels that are wrong; with some more of them the loss ends 3 % higher.
WRONG, MORE_WRONG = 0.1, 0.107


def data(number, samples, share=WRONG):
    """Samples of a fixed teacher; some of the labels are wrong."""
    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(samples, FEATURES, generator=generator)
    y = (x @ teacher).argmax(1)
    wrong = torch.rand(samples, generator=generator) < share
    return x, torch.where(wrong, torch.randint(0, CLASSES, (samples,), generator=generator), y)


def train(run, seed, kind, steps):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 48), nn.ReLU(), nn.Linear(48, CLASSES))
    rate = 0.02 if kind == "worse" else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)
    monitor = agent.attach(model, optimizer, run=run)
    share = MORE_WRONG if kind == "noisier" else WRONG
    (x, y), held_out = data(2, 16384, share), data(3, 4096, share)
    for step in range(steps):
        batch = torch.randint(0, len(x), (BATCH,))
        time.sleep(LOADING_SLOWLY_S if kind == "slow" else LOADING_S)
        loss = functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        if kind != "halting" or step % 2 == 0:
            optimizer.step()
        if step % EVERY == EVERY - 1:
            model.eval()
            with torch.no_grad():
                nn.CrossEntropyLoss()(model(held_out[0]), held_out[1])
            model.train()
    monitor.close()


def only_timed(run):
    """A training that reports nothing of what it learns."""
    monitor = agent.start(run=run)
    for _ in range(STEPS):
        time.sleep(LOADING_S)
        monitor.step()
    monitor.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for wanted in sys.argv[1:]:
        name, number, sort, *length = wanted.split(":")
        if sort == "only-timed":
            only_timed(name)
        else:
            train(name, int(number), sort, int(length[0]) if length else STEPS)
