"""A small model and its batches, for what is said of losses."""

import torch
from torch import nn


def net(classes=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, classes))


def batch(seed=0, size=5, classes=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator)
    return x, torch.randint(0, classes, (size,), generator=generator)
