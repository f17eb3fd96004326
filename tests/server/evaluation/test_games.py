"""Two real optimizers that step in turns in one process: what rises for one is no divergence."""

import pytest
import torch
from torch import nn

from tests.support.judged import judged
from tests.support.watching import Watching


@pytest.mark.parametrize("players", [1, 2])
def test_the_rising_loss_of_a_player_is_information(tmp_path, players):
    torch.manual_seed(0)
    models = [nn.Linear(4, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    with Watching(tmp_path / "spool") as watching:
        watching.attach(models[0], optimizers[0])
        for step in range(160):
            x = torch.randn(16, 4)
            for model, optimizer in list(zip(models, optimizers, strict=True))[:players]:
                optimizer.zero_grad()
                # What the one learns is less than what the other one takes away, later on.
                loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
                (loss + max(step - 60, 0) * 0.05).backward()
                optimizer.step()
        found = judged(watching.batches(), tmp_path)
    alert = found.one("loss.diverging")
    assert (alert.severity == "info") == (players == 2)
