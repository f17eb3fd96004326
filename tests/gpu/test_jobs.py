"""Real jobs of two ranks on one device: what is wrong is found there, and nothing else."""

from pathlib import Path

import pytest

from tests.support.jobs.judged_job import judged_job

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parents[1] / "support" / "jobs" / "gpu_job.py"
AT, STEPS = 40, 80


def said(judged):
    """What a failing test is to print."""
    return "\n".join(
        f"{a.kind} {a.key} {a.severity} {a.state} {a.title!r} {a.first_step}..{a.last_step} "
        f"{a.stage} {a.tensors} {a.cause} {a.evidence}"
        for a in judged.alerts.values()
    )


def job(folder, form, fault, ranks=2):
    return judged_job(
        SCRIPT, form, fault, str(AT), ranks=ranks, folder=folder,
        environment={"RANKSCOPE_ALLOWANCE": "100"},
    )  # fmt: skip


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16", "compile", "manual", "fsdp2"])
def test_a_healthy_training(tmp_path, form):
    judged = job(tmp_path, form, "none")
    assert not [a for a in judged.alerts.values() if a.severity != "info"], said(judged)
    assert not [e for b in judged.collector.batches for e in b.events if e.kind == "agent.fault"]
    # Under FSDP2 each rank holds a part of its own.
    known = "not_applicable" if form == "fsdp2" else "ok"
    assert judged.checks["desync.parameters"].status == known


@pytest.mark.parametrize("form", ["nccl", "nccl-fsdp2"])
def test_a_single_rank_over_nccl(tmp_path, form):
    judged = job(tmp_path, form, "none", ranks=1)
    assert not [a for a in judged.alerts.values() if a.severity != "info"], said(judged)
    assert not [e for b in judged.collector.batches for e in b.events if e.kind == "agent.fault"]
    assert len(judged.collector.points("loss")) == STEPS


@pytest.mark.parametrize("form", ["fp32", "bf16", "compile"])
def test_a_weight_that_one_rank_writes_to(tmp_path, form):
    judged = job(tmp_path, form, "weights")
    alert = judged.alerts["desync.parameters"]
    assert alert.first_step in (AT, AT + 1), said(judged)
    assert alert.tensors == ["blocks.1.inner.weight"]


def test_gradients_that_are_not_averaged(tmp_path):
    judged = job(tmp_path, "manual", "gradients")
    roots = {k: a for k, a in judged.alerts.items() if a.severity != "info"}
    assert any(AT - 1 <= a.first_step <= AT + 1 for a in roots.values()), roots
    assert set(roots) & {"desync.parameters", "desync.gradients", "reduction.wrong"}


def test_one_rank_that_reads_bad_data(tmp_path):
    judged = job(tmp_path, "bf16", "batches")
    assert "rank.loss_outlier" in judged.alerts, said(judged)
    alert = judged.alerts["rank.loss_outlier"]
    # Of two ranks it need not be clear which one it is.
    assert 1 in alert.ranks
    assert AT - 4 <= alert.first_step <= AT + 8


@pytest.mark.alone
@pytest.mark.parametrize(
    ("fault", "kind", "who"),
    [
        ("computes", "rank.straggler", [1]),
        ("fetches", "rank.starved", [1]),
        ("reduces", "collective.slow", None),
    ],
)
def test_who_is_slow(tmp_path, fault, kind, who):
    judged = job(tmp_path, "fp32", fault)
    assert kind in judged.alerts, said(judged)
    alert = judged.alerts[kind]
    if who is not None:
        assert list(alert.ranks) == who
    assert AT - 2 <= alert.first_step <= AT + 8, said(judged)
