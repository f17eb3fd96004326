"""Ranks whose inputs end at different steps, in torch's `Join`."""

from pathlib import Path

import pytest

from tests.support.jobs import uneven_job
from tests.support.jobs.judged_job import judged_job

pytestmark = pytest.mark.e2e

SCRIPT = Path(uneven_job.__file__)


@pytest.mark.parametrize("way", ["plain", "accumulating", "sharded"])
def test_steps_that_a_rank_misses_are_counted(way, tmp_path):
    job = judged_job(SCRIPT, way, ranks=2, folder=tmp_path)
    micro = uneven_job.MICRO if way == "accumulating" else 1
    short, long = (n // micro for n in uneven_job.BATCHES)
    serious = [kind for kind, alert in job.alerts.items() if alert.severity != "info"]
    # Its shard has no gradients where the rank waits (torch reduces them and throws them away).
    assert serious == (["update.missing"] if way == "sharded" else [])
    losses = [job.collector.points("loss", rank=rank) for rank in range(2)]
    assert max(losses[1]) == uneven_job.EPOCHS * long - 1
    assert all(step % long < short for step in losses[0])
    assert max(losses[0]) // long == uneven_job.EPOCHS - 1
    missed = [e for b in job.collector.batches for e in b.events if e.kind == "steps.missed"]
    expected = 0 if way == "sharded" else uneven_job.EPOCHS
    assert len(missed) == expected
