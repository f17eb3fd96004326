"""Ranks and groups of parameters with a learning rate of their own."""

import numpy as np
import pytest

from rankscope.server.detectors.lr.fastest import Fastest
from tests.support.runs.traces import Trace


@pytest.mark.parametrize("cuts", [(), range(0, 40, 7)], ids=["one", "many"])
@pytest.mark.parametrize(
    ("rates", "who"),
    [
        ((0.05, 3.0, 0.05), (1,)),
        ((0.05, 0.1, 0.05), ()),
        ((0.05, 0.05), ()),
        ((0.05,), ()),
        ((0.01, 0.3, 0.2, 0.01, 0.01), (1, 2)),
    ],
)
def test_those_far_above_most_of_the_others(rates, who, cuts):
    series = {"lr": np.array(rates)[:, None] * np.linspace(1, 0, 40)}
    fastest = Fastest()
    for window in Trace("rates", 0, np.arange(40), series).windows(cuts):
        fastest.take(window)
    assert fastest.ranks == who
    assert fastest.rate == max(rates)
    assert bool(fastest.where()) == bool(who)


def test_how_they_are_named():
    assert Fastest({0: 0.01, 1: 0.3, 2: 0.01}).where() == " of rank 1"


@pytest.mark.parametrize("cuts", [(), range(0, 40, 7)], ids=["one", "many"])
@pytest.mark.parametrize(
    ("rates", "group"),
    [
        ((0.003, 1.5, 0.003), ("1", 1.5)),
        # New layers have ten times the rate of those that are trained already.
        ((1e-5, 1e-4), None),
        # Of groups that are each their own (a rate a layer) none stands out.
        ((1e-5, 1e-4, 1e-3), None),
        ((0.0, 1e-3), None),
        ((1e-3,), None),
    ],
)
def test_a_group_of_parameters_far_above_the_others(rates, group, cuts):
    shape = np.ones((2, 40))
    series = {f"lr/{number}": rate * shape for number, rate in enumerate(rates)}
    fastest = Fastest()
    for window in Trace("rates", 0, np.arange(40), {"lr": shape, **series}).windows(cuts):
        fastest.take(window)
    assert fastest.group == group
    assert bool(fastest.sentence()) == bool(group)
