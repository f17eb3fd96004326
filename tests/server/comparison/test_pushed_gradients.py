"""Norms of gradients that ranks push to a parameter server, and do not reduce."""

import numpy as np

from rankscope.server.comparison.replicas import Replicas
from rankscope.server.comparison.steps import Comparisons
from rankscope.server.window import Series

RANKS, STEPS = np.arange(3), np.arange(4)


def series(values, present=None):
    values = np.broadcast_to(np.array(values, float), (3, 4))
    return Series(values, np.isfinite(values) if present is None else present)


NORMS = series([[np.nan] * 4, [1.0] * 4, [2.0, 1.0, 3.0, 2.0]])


def compared(comparisons, posted):
    found = comparisons.of(posted, {}, [], RANKS, STEPS)
    return {step: c.equal for (step, stage), c in found.items() if stage == "reduced_gradient"}


def test_ranks_that_reduce_are_compared():
    found = compared(Comparisons(Replicas()), {"grad_norm": NORMS})
    assert found == {0: False, 1: True, 2: False, 3: False}


def test_ranks_that_push_are_not_whatever_they_say_of_a_step():
    comparisons = Comparisons(Replicas())
    # At some versions a worker says how often it has pushed, at others another one was faster.
    pushes = series(0.0, np.array([[1, 0, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0]], bool))
    assert compared(comparisons, {"grad_norm": NORMS, "pushes": pushes}) == {}
    assert compared(comparisons, {"grad_norm": NORMS}) == {}


def test_what_else_is_set_on_them_is_compared():
    rates = series([[0.1], [0.1], [0.3]])
    posted = {"lr": rates, "grad_norm": NORMS, "pushes": series(0.0)}
    found = Comparisons(Replicas()).of(posted, {}, [], RANKS, STEPS)
    assert {(stage, c.equal) for (_, stage), c in found.items()} == {("hyperparameters", False)}


def test_a_schedule_may_go_on_between_two_versions():
    posted = {"lr": series([[0.1], [0.1], [0.19]]), "pushes": series(0.0)}
    found = Comparisons(Replicas()).of(posted, {}, [], RANKS, STEPS)
    assert all(c.equal for c in found.values())
