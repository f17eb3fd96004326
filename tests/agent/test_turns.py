"""Optimizers that step in turns, and those that step together."""

import pytest

from rankscope.agent.turns import Turns


def told(rounds):
    """At which steps it is told, of rounds of (nodes at the other's step, nodes at the own one)."""
    turns = Turns()
    found = []
    for step, (other, own) in enumerate(rounds):
        if other is not None:
            turns.other(other)
        if turns.own(own):
            found.append(step)
    return found


def test_graphs_on_both_sides_of_the_other_s_step_are_turns():
    assert told([(10 * i + 5, 10 * i + 10) for i in range(9)]) == [4]


@pytest.mark.parametrize("at", ["own step", "other step"])
def test_optimizers_of_one_backward_pass_take_no_turns(at):
    after = 0 if at == "own step" else 10
    assert told([(10 * i + after, 10 * i + 10) for i in range(9)]) == []


def test_one_optimizer_alone_takes_none():
    assert told([(None, 10 * i) for i in range(9)]) == []
