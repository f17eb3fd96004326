"""What waits in torch's `Join` is wrapped while a monitor listens."""

import torch
from torch.distributed.algorithms.join import Join


def test_the_context_is_given_back(watching):
    before = Join.__exit__
    model = torch.nn.Linear(2, 2)
    monitor = watching.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert Join.__exit__ is not before
    monitor.close()
    assert Join.__exit__ is before
