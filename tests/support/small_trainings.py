"""Trainings of one linear layer, and which of the agent's functions run in them."""

import sys
from pathlib import Path

import torch
from torch.nn import functional

FEATURES, CLASSES = 6, 3


class Outer(torch.optim.Optimizer):
    """An optimizer that steps by another one."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        return self.inner.step(closure)


def loss_of(model, step, rows=5):
    """Of the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (rows,), generator=generator)
    return functional.cross_entropy(model(x), y)


def backward(model, step, rows=5):
    """Makes the gradients of a step; returns its loss."""
    model.zero_grad()
    loss = loss_of(model, step, rows)
    loss.backward()
    return loss.item()


def trained(model, optimizer, steps):
    """Takes steps; returns their losses."""
    losses = []
    for step in steps:
        losses.append(backward(model, step))
        optimizer.step()
    return losses


def sampled_only(values, every):
    """Step -> value, where one step in `every` is sampled."""
    return {step: value for step, value in enumerate(values) if step % every == 0}


def called(action):
    """File and name of the Python functions that run."""
    codes = []
    sys.setprofile(lambda frame, event, argument: codes.append((event, frame.f_code)))
    try:
        action()
    finally:
        sys.setprofile(None)
    return {(Path(c.co_filename).stem, c.co_name) for event, c in codes if event == "call"}
