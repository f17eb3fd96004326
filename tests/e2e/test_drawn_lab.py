"""The lab that draws its faults: grammar, measure of effects, score, and one real job."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.lab.drawn import power
from tests.lab.drawn.effect import effect_of
from tests.lab.drawn.fault import SITES, TIMINGS, draw_fault, part_of
from tests.lab.drawn.lab import Lab, results
from tests.lab.drawn.recipe import MODELS, SCHEMES, draw_recipe
from tests.lab.drawn.score import score_of

NUMBERS = range(600)


@pytest.fixture(scope="module")
def drawn():
    return [(recipe := draw_recipe(n), draw_fault(n, recipe)) for n in NUMBERS]


def test_a_number_says_everything(drawn):
    again = [(recipe := draw_recipe(n), draw_fault(n, recipe)) for n in NUMBERS]
    assert drawn == again


def test_all_of_the_grammar_is_drawn(drawn):
    assert {r.scheme for r, _ in drawn} == set(SCHEMES)
    assert {r.model for r, _ in drawn} == set(MODELS)
    assert {f.timing for _, f in drawn} == set(TIMINGS)
    assert {f.family for _, f in drawn} == {f"{s}/{t}" for s, ts in SITES.items() for t in ts}


def test_families_lie_in_one_part_each_and_both_parts_have_many():
    families = [f"{site}/{t}" for site, transforms in SITES.items() for t in transforms]
    judged = [family for family in families if part_of(family) == "judging"]
    assert 0.35 < len(judged) / len(families) < 0.65


def test_faults_lie_inside_their_runs_and_ranks(drawn):
    for recipe, fault in drawn:
        assert set(fault.ranks) <= set(range(recipe.world))
        assert fault.ranks
        acting = [step for step in range(recipe.steps) if fault.acts(step)]
        assert acting[0] == fault.onset
        assert fault.timing != "once" or len(acting) == 1


def seen(recipe, **changed):
    rank = {
        "loss": np.linspace(2.0, 1.0, recipe.steps) + 0.01 * np.sin(np.arange(recipe.steps)),
        "local": np.ones(recipe.steps),
        "norm": np.ones(recipe.steps),
        "seconds": np.full(recipe.steps, 0.01),
        "digest": np.arange(recipe.steps, dtype=float),
    }
    return [{**rank, **(changed if r == 0 else {})} for r in range(recipe.world)]


def a_case(site="labels", world=2):
    recipe = replace(draw_recipe(0), scheme="ddp", world=world, steps=120)
    fault = replace(
        draw_fault(0, recipe), site=site, transform="scale", timing="from", onset=50, ranks=(0,)
    )
    return recipe, fault


def test_a_fault_without_an_effect_does_not_matter():
    recipe, fault = a_case()
    assert not effect_of(fault, recipe, seen(recipe), seen(recipe)).matters


@pytest.mark.parametrize(
    ("changed", "measured"),
    [
        ({"digest": np.arange(120.0) + (np.arange(120) > 60)}, "differ"),
        ({"loss": np.where(np.arange(120) == 70, np.nan, 1.0)}, "nonfinite"),
        ({"norm": np.where(np.arange(120) == 70, 12.0, 1.0)}, "tenfold"),
        ({"loss": np.linspace(2.0, 1.8, 120)}, "worse"),
        ({"digest": np.arange(60.0)}, "ended"),
    ],
)
def test_effects_that_matter(changed, measured):
    recipe, fault = a_case()
    effect = effect_of(fault, recipe, seen(recipe, **changed), seen(recipe))
    assert effect.matters
    assert effect.size >= 1
    assert getattr(effect, measured) > (0 if measured != "tenfold" else 10)


def alert(**given):
    usual = {
        "kind": "desync.hyperparameters",
        "severity": "warning",
        "ranks": [0],
        "first_step": 50,
        "since": {"after": 49, "by": 50},
        "parent": None,
    }
    return usual | given


def test_the_right_alert_is_right_in_everything():
    recipe, fault = a_case("hyperparameters", world=4)
    score = score_of(fault, recipe, [alert()])
    assert (score.found, score.placed, score.rank, score.step, score.extra) == (True,) * 4 + (0,)


@pytest.mark.parametrize(
    ("given", "lost"),
    [
        ({"severity": "info"}, ("found", "placed", "rank", "step")),
        ({"parent": "another"}, ("found", "placed", "rank", "step")),
        ({"first_step": 2}, ("found", "placed", "rank", "step")),
        ({"kind": "loss.spike"}, ("placed",)),
        ({"ranks": [1]}, ("rank",)),
        ({"first_step": 90, "since": {"after": 80, "by": 90}}, ("step",)),
    ],
)
def test_what_is_wrong_of_an_alert_is_counted(given, lost):
    recipe, fault = a_case("hyperparameters", world=4)
    score = score_of(fault, recipe, [alert(**given)]).as_json()
    assert {name for name in ("found", "placed", "rank", "step") if not score[name]} == set(lost)


@pytest.mark.e2e
def test_a_real_training_is_run_judged_and_not_run_again(tmp_path):
    # Parameters of one rank of a DDP job, noise once: the first such number of the tuning part.
    number = next(
        n
        for n in range(5000)
        if (recipe := draw_recipe(n)).scheme == "ddp"
        and recipe.world == 2
        and recipe.steps == 120
        and (fault := draw_fault(n, recipe)).site == "parameters"
        and len(fault.ranks) == 1
        and part_of(fault.family) == "tuning"
    )
    with Lab(tmp_path) as lab:
        healthy = lab.healthy(number)
    # It goes on where it ended, with a server of its own.
    with Lab(tmp_path) as lab:
        faulty = lab.faulty(number)
        assert (lab.healthy(number), lab.faulty(number)) == (None, None)
    assert (healthy["error"], faulty["error"], healthy["false_alarms"]) == ("", "", [])
    assert faulty["effect"]["differ"]
    assert faulty["score"]["found"]
    assert faulty["score"]["placed"]
    kept = results(tmp_path)
    assert kept == json.loads(json.dumps([healthy, faulty]))
    page = tmp_path / "power.md"
    power.write_page(kept, page)
    assert "tuning: all" in page.read_text(encoding="utf-8")
    assert page.with_suffix(".svg").read_text(encoding="utf-8").startswith("<svg")
