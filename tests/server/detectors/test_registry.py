"""The list of detectors, and what it refuses."""

import inspect

import pytest

from rankscope.agent import wire
from rankscope.server import detectors
from rankscope.server.detectors.base import Detector, Outcome
from rankscope.server.detectors.runner import Evaluation

# What this version promises to find.
PROMISED = {
    "desync.parameters",
    "desync.gradients",
    "loss.nonfinite",
    "loss.spike",
    "loss.diverging",
    "loss.oscillating",
    "rank.loss_outlier",
    "rank.silent",
}


def test_what_is_promised_is_looked_for():
    kinds = [kind for detector in detectors.build() for kind in detector.kinds]
    assert set(kinds) >= PROMISED
    assert set(kinds) <= set(wire.KINDS)


def test_every_class_of_the_package_is_in_the_list():
    def below(one):
        for child in one.__subclasses__():
            yield child
            yield from below(child)

    ours = {c for c in below(Detector) if c.__module__.startswith("rankscope.")}
    assert {c for c in ours if not inspect.isabstract(c)} == set(detectors.DETECTORS)


def test_all_of_them_start():
    assert "loss" in Evaluation(detectors.build()).needs


DOCUMENTED = """One line.

    Statistic:
        s

    Severity:
        s

    Evidence:
        s

    Source:
        s
    """


def made(name, *kinds, doc=DOCUMENTED):
    def advance(self, window, state):
        return Outcome({})

    body = {"kinds": kinds, "__doc__": doc, "start": lambda self: None, "advance": advance}
    return type(name, (Detector,), body)


@pytest.mark.parametrize(
    ("classes", "told"),
    [
        ([made("One")], "One declares no kind"),
        ([made("One", "loss.bad")], "One declares loss.bad, which is none of"),
        (
            [made("One", "loss.spike"), made("Two", "loss.plateau", "loss.spike")],
            "Two and One both declare loss.spike",
        ),
        (
            [made("One", "loss.spike", doc="Statistic: and so on.\n\n    Severity:\n")],
            "the docstring of One lacks Statistic:, Evidence:, Source:",
        ),
    ],
)
def test_what_is_refused(classes, told):
    with pytest.raises(ValueError, match=told):
        detectors.validate(classes)


def test_what_is_taken():
    detectors.validate([made("One", "loss.spike"), made("Two", "loss.plateau")])
