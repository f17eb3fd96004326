"""What a training of one process has saved, and the command that compares it."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn

from rankscope.agent.checkpoints.command import main


def state(model, optimizer, step):
    return copy.deepcopy(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
            "rng": torch.get_rng_state(),
            "numpy": np.random.RandomState(0).get_state(),
        }
    )


@pytest.fixture(scope="module")
def trained():
    """Checkpoints after 3 and 4 steps of Adam."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())
    states = []
    for step in range(1, 5):
        optimizer.zero_grad()
        model(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
        states.append(state(model, optimizer, step))
    return states[2:]


@pytest.fixture
def saved(tmp_path, trained):
    """Saves an object, by default the checkpoint of step 3; gives its path."""

    def save(name, given=None, **how):
        path = tmp_path / name
        torch.save(copy.deepcopy(trained[0]) if given is None else given, path, **how)
        return str(path)

    return save


@pytest.fixture
def verify(capsys):
    """Calls the command; gives its exit code, and what it printed: text, JSON, complaint."""

    def call(*arguments):
        code = main([*map(str, arguments)])
        text, complaint = capsys.readouterr()
        asked = main([*map(str, arguments), "--json"])
        printed = capsys.readouterr().out
        assert asked == code
        return code, text, json.loads(printed) if printed else None, complaint

    return call
