"""The list of detectors, and what it refuses."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

from rankscope.server import detectors
from rankscope.server.detectors.base import Detector, Outcome
from rankscope.server.detectors.registry import KINDS
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
    assert kinds == list(dict.fromkeys(kinds))
    assert set(kinds) == set(KINDS)


def test_every_class_of_the_package_is_in_the_list():
    def below(one):
        for child in one.__subclasses__():
            yield child
            yield from below(child)

    for module in pkgutil.walk_packages(detectors.__path__, f"{detectors.__name__}."):
        importlib.import_module(module.name)
    ours = {c for c in below(Detector) if c.__module__.startswith("rankscope.")}
    assert {c for c in ours if not inspect.isabstract(c)} == set(detectors.DETECTORS)


def test_names_of_kinds_are_known_without_loading_what_finds_them():
    program = (
        "import sys; from rankscope.server.detectors.registry import KINDS;"
        "assert 'loss.spike' in KINDS;"
        "print([m for m in sys.modules if m.startswith('rankscope.server.detectors.')],"
        "'numpy' in sys.modules)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert printed.strip() == "['rankscope.server.detectors.registry'] False"


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
    ("classes", "reported"),
    [
        ([made("One")], "One declares no kind"),
        ([made("One", "loss.bad")], "One declares loss.bad, which the registry does not have"),
        # The first two alone are taken: it is the third that is refused.
        (
            [
                made("One", "loss.spike"),
                made("Two", "loss.plateau"),
                made("Three", "loss.diverging", "loss.spike"),
            ],
            "Three and One both declare loss.spike",
        ),
        (
            [made("One", "loss.spike", doc="Statistic: and so on.\n\n    Severity:\n")],
            "the docstring of One lacks Statistic:, Evidence:, Source:",
        ),
    ],
)
def test_what_is_refused(classes, reported):
    with pytest.raises(ValueError, match=reported):
        detectors.validate(classes)
