"""Losses that do not have to fall: declared, set for a project, or reported by their names."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.server.detectors import DETECTORS, build
from rankscope.server.detectors.base import Detector, Outcome
from rankscope.server.detectors.profiles import PROFILES, TURNS, recognised
from rankscope.server.detectors.runner import Evaluation
from rankscope.server.detectors.settings import effective, read
from rankscope.server.window import Check, Occurrence, Series, Status, Window
from tests.support.incidents import finding
from tests.support.judging import judge
from tests.support.runs.scenarios import recorded

KINDS = ("loss.diverging", "loss.oscillating", "loss.nonfinite")


class Alarmed(Detector[None]):
    """Finds everything at every step."""

    kinds = KINDS

    def start(self):
        return None

    def advance(self, window, state):
        found = [
            replace(finding(kind, step), severity="critical")
            for step in window.steps.tolist()
            for kind in KINDS
        ]
        return Outcome(dict.fromkeys(KINDS, Check(Status.OK, "Judged.")), tuple(found))


def window(first, count, *, config=None, logged=()):
    shape = (2, count)
    series = {m: Series(np.ones(shape), np.ones(shape, bool)) for m in ("loss", *logged)}
    return Window(
        world_size=2,
        ranks=np.arange(2),
        steps=np.arange(first, first + count),
        series=series,
        last_step=first + count - 1,
        config=config or {},
    )


def of_project(profile):
    return effective([read({"profile": profile}, DETECTORS, source="project")], DETECTORS)


def severities(findings):
    return {finding.kind: finding.severity for finding in findings}


def test_without_a_profile_a_loss_has_to_fall():
    findings, checks = Evaluation([Alarmed()]).advance(window(0, 1))
    assert severities(findings) == dict.fromkeys(KINDS, "critical")
    assert {check.status for check in checks.values()} == {"open"}


@pytest.mark.parametrize(
    ("evaluation", "shown", "how"),
    [
        (
            Evaluation([Alarmed()]),
            window(0, 1, config={"profile": "adversarial"}),
            "the run's config declares it",
        ),
        (
            Evaluation([Alarmed()], settings=of_project("adversarial")),
            window(0, 1),
            "the project's settings declare it",
        ),
        (
            Evaluation([Alarmed()]),
            window(0, 1, logged=("loss_g", "loss_d")),
            "the names of its series show it",
        ),
    ],
)
def test_a_game_has_no_loss_that_falls(evaluation, shown, how):
    findings, checks = evaluation.advance(shown)
    assert severities(findings) == {"loss.oscillating": "info", "loss.nonfinite": "critical"}
    assert checks["loss.diverging"].status == "not_applicable"
    assert checks["loss.diverging"].why.startswith(f"Profile adversarial ({how};")
    assert checks["loss.nonfinite"].status == "open"


def test_optimizers_in_turns_are_players_until_a_profile_is_declared():
    turns = (Occurrence(0, 3, TURNS, "turns", {}, 0.0),)
    shown = replace(window(0, 4), events=turns)
    findings, _ = Evaluation([Alarmed()]).advance(shown)
    judged = {(f.kind, f.seen_step): f.severity for f in findings}
    assert [judged["loss.oscillating", step] for step in (2, 3)] == ["critical", "info"]
    # It judges for itself how far the loss of a player may rise.
    assert judged["loss.diverging", 3] == judged["loss.nonfinite", 3] == "critical"
    declared = replace(shown, config={"profile": "descent"})
    findings, _ = Evaluation([Alarmed()]).advance(declared)
    assert set(severities(findings).values()) == {"critical"}


def test_a_trainer_that_acts_in_environments_learns_from_rewards_until_a_profile_is_declared():
    shown = replace(window(0, 4), configs={0: {"environments": []}, 1: {"environments": ["gym"]}})
    findings, checks = Evaluation([Alarmed()]).advance(shown)
    assert severities(findings) == {
        "loss.diverging": "info",
        "loss.oscillating": "info",
        "loss.nonfinite": "critical",
    }
    # It may have been loaded for nothing.
    assert {check.status for check in checks.values()} == {"open"}
    declared = replace(shown, config={"profile": "descent"})
    findings, _ = Evaluation([Alarmed()]).advance(declared)
    assert set(severities(findings).values()) == {"critical"}
    without = replace(shown, configs={0: {"environments": []}, 1: None})
    findings, _ = Evaluation([Alarmed()]).advance(without)
    assert set(severities(findings).values()) == {"critical"}


def test_the_run_s_setting_counts_more_than_the_project_s_and_the_names():
    evaluation = Evaluation([Alarmed()], settings=of_project("adversarial"))
    shown = window(0, 1, config={"profile": "descent"}, logged=("loss_g", "loss_d"))
    assert severities(evaluation.advance(shown)[0])["loss.diverging"] == "critical"


def test_a_profile_that_nobody_knows_changes_nothing():
    findings, _ = Evaluation([Alarmed()]).advance(window(0, 1, config={"profile": ["gan"]}))
    assert severities(findings) == dict.fromkeys(KINDS, "critical")


@pytest.mark.parametrize("cut", [1, 3, 8])
def test_what_names_indicate_counts_from_the_step_at_which_they_are_reported(cut):
    """However the steps are cut into blocks."""
    present = np.zeros((2, 8), bool)
    present[:, 5:] = True
    evaluation, kept = Evaluation([Alarmed()]), []
    for low in range(0, 8, cut):
        whole = window(0, 8, logged=("loss/generator", "loss/critic"))
        part = slice(low, low + cut)
        series = {
            "loss": Series(np.ones((2, len(range(8)[part]))), np.ones_like(present)[:, part]),
            "loss/generator": Series(np.ones((2, 8))[:, part], present[:, part]),
            "loss/critic": Series(np.ones((2, 8))[:, part], np.ones_like(present)[:, part]),
        }
        block = replace(whole, steps=whole.steps[part], series=series, last_step=low + cut - 1)
        kept += evaluation.advance(block)[0]
    assert [f.seen_step for f in kept if f.kind == "loss.diverging"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("names", "profile"),
    [
        ({"loss_G", "loss_D"}, "adversarial"),
        ({"generator/loss", "critic/loss"}, "adversarial"),
        ({"policy_loss", "value_loss"}, "reinforcement"),
        ({"loss/actor", "loss/critic"}, "reinforcement"),
        ({"losses/policy_loss", "losses/value_loss", "losses/entropy"}, "reinforcement"),
        ({"train/policy_gradient_loss", "train/value_loss"}, "reinforcement"),
        ({"losses/qf_loss", "losses/actor_loss"}, "reinforcement"),
        ({"Loss/Generator", "Loss/Discriminator"}, "adversarial"),
        ({"train/loss_g", "train/loss_d"}, "adversarial"),
        ({"loss_g", "loss"}, None),
        ({"eval/loss", "train/loss", "value_loss"}, None),
        ({"loss", "accuracy", "critic_loss"}, None),
        (set(), None),
    ],
)
def test_names_that_indicate_a_profile(names, profile):
    assert recognised(names) == profile


def test_every_profile_speaks_of_kinds_that_there_are():
    for profile in PROFILES.values():
        assert {*profile.without, *profile.lenient} <= {k for d in DETECTORS for k in d.kinds}
        assert not set(profile.without) & profile.lenient


def test_a_ring_gan_that_learns_well_raises_nothing_once_it_says_what_it_is():
    """Its loss rises by a half of what it had fallen: the critic has learned."""
    trace = recorded(0, trace="H18-ring-gan")
    plain = judge(trace, build()).of("loss.diverging")
    assert plain
    assert plain[0].severity == "warning"
    settings = of_project("adversarial")
    judged = judge(trace, build(settings), settings=settings)
    assert [a for a in judged.alerts if a.severity != "info"] == []
    assert judged.checks["loss.diverging"].status == "not_applicable"
    assert judged.checks["loss.nonfinite"].status == "ok"


def test_a_policy_s_loss_that_rises_is_advised_how_to_declare_it():
    rng = np.random.default_rng(0)
    values = np.concatenate([np.linspace(20, 9, 150), np.linspace(9, 45, 150)])
    losses = np.tile(values * np.exp(0.05 * rng.standard_normal(300)), (2, 1))
    shown = {}
    for profile in (None, "reinforcement"):
        config = {} if profile is None else {"profile": profile}
        whole = replace(
            window(0, 300, config=config),
            series={"loss": Series(losses, np.ones(losses.shape, bool))},
        )
        found, _ = Evaluation(build()).advance(whole)
        shown[profile] = [f for f in found if f.kind == "loss.diverging"]
    [finding] = shown[None]
    assert '"profile": "reinforcement"' in finding.remedy
    assert shown["reinforcement"] == []


def test_clipping_is_at_most_information_where_returns_set_the_gradient():
    assert "clipping.saturated" in PROFILES["reinforcement"].lenient
