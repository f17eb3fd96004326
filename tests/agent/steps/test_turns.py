"""Optimizers that step in turns, and those that step together."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from rankscope.agent.steps.turns import Turns


def reported(rounds):
    """Steps at which it is reported; a round is (nodes at the other's step, nodes at its own)."""
    turns = Turns()
    found, before = [], 0
    for step, (other, own) in enumerate(rounds):
        if other is not None:
            turns.other(other, before)
        if turns.own(step, own):
            found.append(step)
        before = own
    return found


def test_graphs_on_both_sides_of_the_other_s_step_are_turns():
    assert reported([(10 * i + 5, 10 * i + 10) for i in range(9)]) == [3]


@pytest.mark.parametrize("at", ["own step", "other step"])
def test_optimizers_of_one_backward_pass_take_no_turns(at):
    after = 0 if at == "own step" else 10
    assert reported([(10 * i + after, 10 * i + 10) for i in range(9)]) == []


def test_one_optimizer_alone_takes_none():
    assert reported([(None, 10 * i) for i in range(9)]) == []


def players(watching, step):
    """Two networks, one of them watched; `step` takes a round of both."""
    generator, critic = nn.Linear(3, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1) for n in (generator, critic)]
    watching.attach(generator, optimizers[0])
    for _ in range(10):
        step(generator, critic, *optimizers)
    return watching.events("optimizers.turns")


def test_players_of_a_game_take_turns(watching):
    def step(generator, critic, own, other):
        noise, real = torch.randn(5, 3), torch.ones(5, 1)
        other.zero_grad()
        score = critic(generator(noise).detach())
        functional.binary_cross_entropy_with_logits(score, 1 - real).backward()
        other.step()
        own.zero_grad()
        functional.binary_cross_entropy_with_logits(critic(generator(noise)), real).backward()
        own.step()

    [(at, text)] = players(watching, step)
    assert at == 3
    assert "in turns" in text


def test_two_optimizers_of_one_loss_take_none(watching):
    def step(generator, critic, own, other):
        for optimizer in (own, other):
            optimizer.zero_grad()
        critic(generator(torch.randn(5, 3))).square().mean().backward()
        for optimizer in (other, own):
            optimizer.step()

    assert players(watching, step) == []


def play(watching, run, *, restored=False, every=1):
    """A game on one rank, both players watched.

    Args:
        restored: what the critic's optimizer has applied is put back before the other one steps.
        every: it steps at one step in so many.
    """
    torch.manual_seed(0)
    both = nn.ModuleDict({"generator": nn.Linear(3, 4), "critic": nn.Linear(4, 1)})
    generator, critic = both["generator"], both["critic"]
    own, other = (torch.optim.SGD(n.parameters(), lr=0.1) for n in (generator, critic))
    watching.attach(both, own, run=run)
    for step in range(12):
        noise = torch.randn(5, 3)
        if step % every == 0:
            other.zero_grad()
            both_sorts = torch.cat([generator(noise).detach(), torch.ones(5, 4)])
            critic(both_sorts).square().mean().backward()
            other.step()
        applied = [p.grad.clone() for p in critic.parameters()]
        own.zero_grad()
        critic(generator(noise)).mean().backward()
        if restored:
            for parameter, gradient in zip(critic.parameters(), applied, strict=True):
                parameter.grad = gradient
        own.step()


def test_what_a_pass_leaves_in_the_other_s_parameters_is_not_what_was_applied(watching):
    play(watching, "left")
    play(watching, "restored", restored=True)
    left, restored = (watching.digests("reduced_gradient", run=r) for r in ("left", "restored"))
    assert len(left) == 12
    assert left == restored


@pytest.mark.parametrize("every", [1, 2])
def test_norms_are_of_what_a_step_applies(watching, every):
    """One rank's own gradient is the one that it applies: of the generator alone."""
    play(watching, "game", every=every)
    own, applied = (watching.points(n, run="game") for n in ("grad_norm_local", "grad_norm"))
    assert len(own) == len(applied) == 12
    for step in range(1, 12):
        assert own[step] == pytest.approx(applied[step], rel=1e-5)
