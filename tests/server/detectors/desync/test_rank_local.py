"""Copies of their own that ranks average every few steps: who missed it, and what is not judged."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.server.comparison import compare
from rankscope.server.detectors.data.duplicated import Duplicated
from rankscope.server.detectors.desync.detector import Desync
from rankscope.server.detectors.desync.versions import VersionFacts, Versions
from rankscope.server.window import Series, Window
from tests.support.judging import judge
from tests.support.runs.timings import averages
from tests.support.runs.traces import Trace

EVERYONE = np.arange(4)


class Copies(Trace):
    """A run whose ranks train copies of their own."""

    def windows(self, cuts=()):
        for window in super().windows(cuts):
            yield replace(window, rank_local=frozenset(range(4)))


def equal(stages, steps=80):
    return tuple(compare.agreed(s, stage, EVERYONE, 7) for s in range(steps) for stage in stages)


def run(fault, *, stages=("reduced_gradient", "parameters"), kind=Copies):
    made = averages(0, fault=fault)
    return kind(
        made.name, 0, made.steps, made.series, present=made.present, comparisons=equal(stages)
    )


@pytest.mark.parametrize("cuts", [(), range(0, 80, 7), range(80)], ids=("whole", "blocks", "steps"))
def test_the_rank_that_missed_an_average_of_the_copies_is_named(cuts):
    [alert] = judge(run("once"), [Desync()], cuts=cuts).alerts
    assert (alert.kind, alert.stage) == ("desync.parameters", "outside_optimizer")
    assert (alert.ranks, alert.first_step) == ((1,), 24)


def test_samples_of_other_tensors_do_not_show_who_holds_what():
    stages = ("outside_optimizer", "parameters")
    [alert] = judge(run("once", stages=stages), [Desync()]).alerts
    assert alert.ranks == (1,)
    # Without copies of their own it is what was written that was examined.
    assert judge(run("once", stages=stages, kind=Trace), [Desync()]).alerts == ()


def test_averages_of_all_are_no_alert_and_what_was_left_out_is_said():
    found = judge(run("none"), [Desync()])
    assert found.alerts == ()
    reported = found.checks["desync.parameters"].why
    assert reported.endswith("Not compared: tensors of which each rank trains a copy of its own.")
    plain = judge(run("none", kind=Trace), [Desync()]).checks["desync.parameters"].why
    assert "copy" not in plain


def test_digests_of_models_with_copies_are_no_versions_of_one_model():
    digests = Series(np.arange(4, dtype=np.uint64)[:, None], np.ones((4, 1), bool))
    window = Window(
        world_size=4,
        ranks=EVERYONE,
        steps=np.array([0]),
        series={},
        digests={"start": digests, "parameters": digests},
        rank_local=frozenset(range(4)),
    )
    assert Versions().take(window, 0, range(4)) == VersionFacts()


def test_ranks_that_read_the_same_batches_are_reported():
    same = np.tile(np.arange(1, 41, dtype=np.uint64), (4, 1))
    run = Copies("same", 0, np.arange(40), {"loss": np.ones((4, 40))}, words={"batch": same})
    [alert] = judge(run, [Duplicated()]).alerts
    assert alert.kind == "data.duplicated"
