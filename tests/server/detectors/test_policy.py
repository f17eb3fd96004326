"""Thresholds: declared once, each with a meaning, and nothing else is taken."""

from dataclasses import dataclass

import pytest

from rankscope.server.detectors import DETECTORS
from rankscope.server.detectors.loss.spike import SpikePolicy
from rankscope.server.detectors.policy import (
    Number,
    Observations,
    Policy,
    Share,
    Signed,
    made,
    thresholds,
)


@dataclass(frozen=True, slots=True)
class Some(Policy):
    """Thresholds of nothing.

    What it says here is no threshold: not even this.

    Attributes:
        share: of what there is, reported in a sentence that goes on in the next line.
        many, few: this many.
        trend: it may fall.
    """

    share: Share = 0.5
    many: Observations = 8
    few: Observations = 2
    trend: Signed = -1.0


def test_name_default_unit_and_meaning_are_those_of_the_class():
    share, many, few, trend = thresholds(Some)
    assert (share.name, share.default, share.unit) == ("share", 0.5, "share")
    assert share.meaning == "of what there is, reported in a sentence that goes on in the next line"
    assert (many.default, many.unit, many.meaning) == (8, "observations", "this many")
    assert few.meaning == "this many"
    assert (share.least, share.most) == (0.0, 1.0)
    assert trend.least == float("-inf")


def test_values_have_the_type_of_the_default():
    policy = made(Some, {"share": 1, "many": 5.0, "trend": -7})
    assert policy == Some(share=1.0, many=5, trend=-7.0)
    assert isinstance(policy.share, float)
    assert isinstance(policy.many, int)


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"shrae": 1}, "shrae is no threshold of it; there are share, many, few, trend"),
        ({"share": 1.5}, "share must be a finite number of at least 0 and at most 1, not 1.5"),
        ({"share": "1"}, "share must be a number, not '1'"),
        ({"share": float("nan")}, "share must be a finite number"),
        ({"trend": float("-inf")}, "trend must be a finite number, not -inf"),
        ({"many": True}, "many must be a whole number, not True"),
        ({"many": 2.5}, "many must be a whole number, not 2.5"),
        ({"many": float("inf")}, "many must be a whole number, not inf"),
        ({"many": 0}, "many must be a finite number of at least 1, not 0"),
    ],
)
def test_what_is_refused(values, reported):
    with pytest.raises(ValueError, match=reported):
        made(Some, values)


def test_a_detector_without_thresholds_can_only_be_switched_off():
    assert thresholds(Policy) == ()
    with pytest.raises(ValueError, match="there are none: it can only be switched off"):
        made(Policy, {"min_z": 1})


def test_a_threshold_that_nobody_describes_is_refused():
    @dataclass(frozen=True, slots=True)
    class Silent(Policy):
        """Thresholds."""

        least: Number = 1.0

    @dataclass(frozen=True, slots=True)
    class Text(Policy):
        """Thresholds.

        Attributes:
            name: of it.
        """

        name: str = ""

    with pytest.raises(TypeError, match="docstring of Silent does not say what least is"):
        thresholds(Silent)
    with pytest.raises(TypeError, match="Text.name is no number with a default"):
        thresholds(Text)


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda d: d.__name__)
def test_every_detector_judges_by_what_it_declares(detector):
    policy = detector().policy
    assert type(policy) is detector.policies
    for threshold in thresholds(detector.policies):
        assert threshold.checked(threshold.default) == getattr(policy, threshold.name)
        assert threshold.meaning


def test_the_documented_number_is_the_one_in_force():
    known = {t.name: t for t in thresholds(SpikePolicy)}
    assert known["min_z"].default == 8.0
    assert known["min_z"].unit == "standard deviations"
    assert "robust z" in known["min_z"].meaning
