import ast
import inspect
import math
from pathlib import Path

import pytest

from rankscope import server
from rankscope.server.detectors.mechanisms import wording

SOURCES = sorted(Path(inspect.getfile(server)).parent.rglob("*.py"))
# Words whose plural is not the word and an s.
PLURALS = {
    "backward pass": "backward passes",
    "forward pass": "forward passes",
    "batch": "batches",
    "micro-batch": "micro-batches",
    "odd batch": "odd batches",
    "matrix": "matrices",
    "pass": "passes",
    "push": "pushes",
    "sampled loss": "sampled losses",
}
VERBS = {"is": "are", "was": "were", "has": "have", "does": "do"}


def arguments_of(name):
    """The last argument of each call of a function of that name, where it is a literal."""
    return sorted(
        {
            call.args[1].value
            for path in SOURCES
            for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id == name
            and len(call.args) == 2
            and isinstance(call.args[1], ast.Constant)
        }
    )


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([2], "rank 2"),
        ([3, 0], "ranks 0 and 3"),
        ([0, 1, 3], "ranks 0, 1 and 3"),
        (range(8, 16), "ranks 8-15"),
        ([0, 1, 2, 5, 9, 10, 11], "ranks 0-2, 5 and 9-11"),
    ],
)
def test_ranks(numbers, text):
    assert wording.ranks(numbers) == text


def test_many_are_not_all_named():
    assert wording.listing([str(n) for n in range(20)], most=3) == "0, 1, 2 and 17 more"
    assert wording.listing([]) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.0123456, "0.0123"),
        (1.0, "1"),
        (2.345678, "2.35"),
        (12345.6, "12,346"),
        (3e9, "3.00e+09"),
        (-4e-7, "-4.00e-07"),
        (math.nan, "NaN"),
        (math.inf, "infinity"),
        (-math.inf, "-infinity"),
    ],
)
def test_numbers(value, text):
    assert wording.number(value) == text


def test_counts_and_sentences():
    assert wording.count(1, "step") == "1 step"
    assert wording.count(1200, "step") == "1,200 steps"
    assert wording.percent(0.683) == "68 %"
    assert wording.sentences("One.", "", "Two.") == "One. Two."


@pytest.mark.parametrize("thing", arguments_of("count"))
def test_every_noun_that_is_counted_has_its_plural(thing):
    many = PLURALS.get(thing, f"{thing}s")
    assert thing in PLURALS or not thing.endswith(("s", "x", "z", "ch", "sh", "y")), "name it"
    assert wording.count(0, thing) == f"0 {many}"
    assert wording.count(1, thing) == f"1 {thing}"
    assert wording.count(2, thing) == f"2 {many}"


def test_nouns_are_found_in_the_source():
    assert {"step", "odd batch", "matrix", "trained tensor"} <= set(arguments_of("count"))


@pytest.mark.parametrize(
    ("thing", "many"), [("entry", "entries"), ("day", "days"), ("loss", "losses")]
)
def test_plurals_by_the_ending(thing, many):
    assert wording.plural(thing) == many


@pytest.mark.parametrize("verb", arguments_of("agree"))
def test_every_verb_agrees_with_its_number(verb):
    assert verb in VERBS or verb.endswith(("es", "s"))
    assert wording.agree(1, verb) == verb
    for many in (0, 2):
        assert wording.agree(many, verb) == VERBS.get(verb, verb[:-1])


def test_no_text_mends_a_plural_by_hand():
    by_hand = [
        f"{path.name}: {text}"
        for path in SOURCES
        for text in ("batchs", "matrixs", "'s' if", "'es' if", "else 's'", "else 'es'")
        if "detectors" in path.parts and text in path.read_text(encoding="utf-8")
    ]
    assert by_hand == []


def test_what_is_said_of_several_ranks_only():
    assert wording.if_several(2, "of every rank") == " of every rank"
    assert wording.if_several(4, "on every rank", before=", ") == ", on every rank"
    assert wording.if_several(1, "of every rank") == ""
