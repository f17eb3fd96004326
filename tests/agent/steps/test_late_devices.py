"""A device that answers late, and not always: what its answers are compared with comes first."""

import pytest
import torch
from torch.nn import functional

from rankscope.agent.fingerprint import FingerprintPlan
from tests.support.watching import CLASSES, FEATURES, Watching, net


class Late:
    """Fingerprints that are under way for as many questions as given."""

    def __init__(self, pending, questions):
        self._pending, self._left = pending, questions
        self.squares = None

    def ready(self):
        self._left -= 1
        return self._left < 0

    def result(self):
        return self._pending.result()


@pytest.fixture
def watching(tmp_path):
    with Watching(tmp_path) as made:
        yield made


@pytest.mark.parametrize("questions", [(5, 0), (0, 5), (1, 2), (40, 0, 0)], ids=str)
def test_an_answer_that_overtakes_changes_nothing(watching, monkeypatch, questions):
    begin, calls = FingerprintPlan.begin, [0]

    def late(plan, tensors, **options):
        calls[0] += 1
        options.pop("squares", None)
        return Late(begin(plan, tensors, **options), questions[calls[0] % len(questions)])

    found = []
    for simulated in (False, True):
        if simulated:
            monkeypatch.setattr(FingerprintPlan, "begin", late)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        watching.attach(model, optimizer, run=f"run-{simulated}")
        generator = torch.Generator().manual_seed(0)
        for _ in range(12):
            x = torch.randn(4, FEATURES, generator=generator)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), torch.arange(4) % CLASSES).backward()
            optimizer.step()
        monkeypatch.undo()
        watching.close()
        run = f"run-{simulated}"
        stages = ("start", "parameters", "outside_optimizer", "batch")
        found.append({stage: watching.model_digests(stage, run) for stage in stages})
    assert set(found[0]["outside_optimizer"].values()) == {0}
    assert found[1] == found[0]
