"""Fingerprints of buffers, taken where they must agree."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope.agent.probes.parameters.buffers import Buffers
from tests.support.jobs.ddp_buffers import digest, made, train_step, worker
from tests.support.jobs.ranks import forked_ranks, forking
from tests.support.probe_harness import Harness


def run(model, steps=3, between=None):
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.01), probes=[Buffers])
    try:
        for step in range(steps):
            train_step(model, harness.optimizer, step)
            if between is not None and step == steps - 2:
                between(model)
    finally:
        harness.close()
    return harness


def test_every_buffer_has_a_fingerprint():
    harness = run(made())
    names = (
        "mask",
        "scratch",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    )
    assert harness.announced["buffers"].names == names
    assert harness.announced["buffers"].dtypes[0] == "int64"
    (fingerprint,) = harness.steps[-1].fingerprints
    assert (fingerprint.stage, fingerprint.table, len(fingerprint.digests)) == (
        "buffers",
        "buffers",
        5,
    )


def test_equal_runs_agree_and_each_step_has_its_own_statistics():
    first, second = run(made()), run(made())
    digests = [digest(first, i) for i in range(3)]
    assert digests == [digest(second, i) for i in range(3)]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("index", range(5))
def test_a_change_of_any_buffer_shows(index):
    def spoil(model):
        list(model.buffers())[index].view(-1)[0] += 1

    healthy, spoiled = run(made()), run(made(), between=spoil)
    differ = healthy.steps[-1].fingerprints[0].digests != spoiled.steps[-1].fingerprints[0].digests
    assert differ.tolist() == [i == index for i in range(5)]
    assert digest(healthy) != digest(spoiled)


def test_evaluation_is_not_sampled():
    model = made()
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.01), probes=[Buffers])
    try:
        train_step(model, harness.optimizer, 0)
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 4))
            model.mask += 1
        model.train()
        train_step(model, harness.optimizer, 1)
    finally:
        harness.close()
    assert len(harness.steps) == 2
    # What the evaluation changed is what the step began with.
    assert digest(harness) != digest(run(made(), steps=2))


def test_a_step_whose_forward_was_not_seen_is_sampled_at_its_end():
    model = made()
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.01), probes=[Buffers])
    try:
        model.norm(model.linear(torch.ones(2, 4))).sum().backward()
        harness.optimizer.step()
    finally:
        harness.close()
    assert "buffers" in harness.steps[0].digests


def test_a_model_without_buffers_says_nothing():
    model = nn.Linear(2, 2)
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.01), probes=[Buffers])
    try:
        model(torch.ones(1, 2)).sum().backward()
        harness.optimizer.step()
    finally:
        harness.close()
    assert harness.steps[0].digests == {}
    assert harness.announced == {}


def test_under_ddp_it_is_what_was_broadcast(tmp_path):
    results = forking.Queue()
    forked_ranks(worker, str(tmp_path), results, ranks=2)
    (_, first, ended, hooks), (_, second, other, _) = sorted(results.get() for _ in range(2))
    assert first == second
    assert len(set(first)) == 3
    assert ended != other  # batch norm made them unequal since
    assert hooks == 0


def test_the_hook_of_a_forward_that_failed_is_silent_in_copies_and_goes(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = DistributedDataParallel(made())
        harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.01), probes=[Buffers])
        # The root's forward is seen and the inner one never comes.
        harness.root_forward(model, (torch.ones(2, 4),), {})
        assert len(model.module._forward_pre_hooks) == 1
        twin = copy.deepcopy(model.module)
        twin(torch.ones(2, 4))
        torch.save(model.module, io.BytesIO())
        assert len(model.module._forward_pre_hooks) == 1
        harness.close()
        assert len(model.module._forward_pre_hooks) == 0
    finally:
        torch.distributed.destroy_process_group()


def test_statistics_that_are_not_finite_are_counted_and_named_once():
    def spoil(model):
        model.norm.running_var[0] = float("nan")

    harness = run(made(), steps=5, between=spoil)
    counted = [facts.scalars.get("buffers_nonfinite") for facts in harness.steps]
    assert counted == [0, 0, 0, 0, 1]
    [(step, kind, text, data)] = harness.events
    assert (step, kind) == (4, "buffers.nonfinite")
    assert data == {"tensors": ["norm.running_var"], "count": 1}
    assert "norm.running_var" in text


def test_a_mask_of_infinities_is_meant_and_statistics_of_nan_never_are():
    model = made()
    model.register_buffer("causal", torch.full((3, 3), -float("inf")).triu(1))
    harness = run(model)
    assert [facts.scalars["buffers_nonfinite"] for facts in harness.steps] == [0, 0, 0]
    model = made()
    model.norm.running_mean[1] = float("nan")
    harness = run(model)
    assert [facts.scalars["buffers_nonfinite"] for facts in harness.steps] == [1, 1, 1]
    assert len(harness.events) == 1
