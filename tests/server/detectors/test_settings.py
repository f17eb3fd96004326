"""Settings: layers, what they come to, and that detectors judge by them."""

import json

import pytest

from rankscope.server import detectors
from rankscope.server.detectors import DETECTORS, build
from rankscope.server.detectors.lr.too_high import RateTooHigh
from rankscope.server.detectors.settings import (
    Effective,
    Overrides,
    SettingsError,
    defaults,
    effective,
    read,
)
from tests.support.judging import judge
from tests.support.runs.replicas import apart
from tests.support.runs.scenarios import recorded, spikes

JUMPS = spikes(0, at=[250, 251, 252])


def layer(data, source="somebody"):
    return read(data, DETECTORS, source=source)


def settings(*layers):
    return effective(layers, DETECTORS)


def test_nothing_set_is_what_detectors_declare():
    plain = settings()
    assert plain.values == defaults(DETECTORS)
    assert (plain.profile, plain.off, plain.sources) == (None, frozenset(), {})
    for detector in DETECTORS:
        assert plain.policy(detector) == detector.policies()
    assert {k for d in DETECTORS for k in d.kinds} == set(plain.values)


def test_the_later_layer_counts_and_both_are_named():
    first = layer({"detectors": {"loss.spike": {"min_z": 9, "calm": 20}}}, "file")
    second = layer(
        {"profile": "contrastive", "detectors": {"loss.spike": {"min_z": 12, "enabled": True}}},
        "project",
    )
    both = settings(first, second)
    assert both.values["loss.spike"]["min_z"] == 12.0
    assert both.values["loss.spike"]["calm"] == 20
    assert both.values["loss.spike"]["evidence"] == 32
    assert both.sources == {
        "loss.spike": {"min_z": "project", "calm": "file", "enabled": "project"}
    }
    assert both.profile == "contrastive"


def test_a_detector_is_switched_off_in_one_entry_and_on_again():
    off = layer({"detectors": {"loss.spike": False, "desync.gradients": {"enabled": False}}})
    assert settings(off).off == {"loss.spike", "desync.gradients"}
    on = layer({"detectors": {"loss.spike": True}})
    assert settings(off, on).off == {"desync.gradients"}


def test_toml_s_way_of_nesting_is_understood():
    nested = layer({"detectors": {"loss": {"spike": {"min_z": 9}, "plateau": False}}})
    assert nested.values == {"loss.spike": {"min_z": 9.0}, "loss.plateau": {"enabled": False}}


def test_what_is_kept_with_a_run_comes_back_as_it_was():
    kept = settings(layer({"profile": "surrogate", "detectors": {"loss.spike": {"min_z": 9}}}))
    assert Effective.from_json(json.loads(json.dumps(kept.to_json()))) == kept


def test_what_another_version_kept_is_taken_as_far_as_it_goes():
    old = Effective(
        None, {"loss.spike": {"enabled": True, "min_z": 9.0, "gone": 3.0, "calm": -5}, "x.y": {}}
    )
    policies = {d: old.policy(d) for d in DETECTORS}
    (spike,) = [p for d, p in policies.items() if d.kinds == ("loss.spike",)]
    assert (spike.min_z, spike.calm, spike.evidence) == (9.0, 16, 32)


@pytest.mark.parametrize(
    ("data", "reported"),
    [
        ([], "settings must be a map of profile and detectors"),
        ({"detector": {}}, "'detector' is none of profile, detectors"),
        ({"profile": "gan"}, "profile 'gan' is none of descent, adversarial, reinforcement"),
        ({"detectors": []}, "detectors must be a map from kinds"),
        ({"detectors": {"loss.spke": False}}, "no detector 'loss.spke': did you mean loss.spike?"),
        ({"detectors": {"nonsense": False}}, "There are desync.parameters, desync.gradients,"),
        ({"detectors": {"loss.spike": 3}}, "loss.spike must be true, false, or a map"),
        ({"detectors": {"loss.spike": {"enabled": 1}}}, "enabled must be true or false, not 1"),
        ({"detectors": {"loss.spike": {"z": 1}}}, "loss.spike: z is no threshold of it; there are"),
        ({"detectors": {"loss.spike": {"min_z": -1}}}, "loss.spike: min_z must be a finite number"),
        (
            {"detectors": {"desync.gradients": {"drift": 1e-9}}},
            "judged together with desync.parameters; write drift under desync.parameters",
        ),
    ],
)
def test_what_is_wrong_is_reported_with_what_there_is(data, reported):
    with pytest.raises(SettingsError) as caught:
        layer(data)
    assert reported in str(caught.value)


def test_everything_that_is_wrong_is_reported_at_once():
    with pytest.raises(SettingsError) as caught:
        layer({"profile": "gan", "detectors": {"loss.spike": {"z": 1}, "nonsense": False}})
    assert len(caught.value.problems) == 3


def test_detectors_judge_by_what_is_set():
    assert judge(JUMPS, build(settings())).of("loss.spike")
    deaf = settings(layer({"detectors": {"loss.spike": {"min_ratio": 1000}}}))
    judged = judge(JUMPS, build(deaf), settings=deaf)
    assert not judged.of("loss.spike")
    assert judged.checks["loss.spike"].status == "ok"


def test_a_kind_that_follows_from_others_judges_them_as_they_are_set():
    rising = recorded(0, trace="F14-growing-lr")
    assert judge(rising, [RateTooHigh.of(settings().policy)]).of("lr.too_high")
    deaf = settings(
        layer(
            {
                "detectors": {
                    "loss.diverging": {"min_lost": 1e99, "min_factor_lost": 1e99, "blown_up": 1e99},
                    "loss.oscillating": {"min_amplitude": 1e99},
                    "gradient.exploding": {"factor": 1e99},
                }
            }
        )
    )
    assert not judge(rising, [RateTooHigh.of(deaf.policy)]).of("lr.too_high")


def test_what_is_off_finds_nothing_and_says_so():
    off = settings(layer({"detectors": {"loss.spike": False}}))
    assert len(build(off)) == len(build()) - 1
    judged = judge(JUMPS, build(off), settings=off)
    assert not judged.of("loss.spike")
    assert judged.checks["loss.spike"].status == "off"
    assert judged.checks["loss.diverging"].status == "ok"


def test_one_kind_of_several_is_off_and_the_others_are_judged():
    bits = apart(0, fault="bitflip")
    on = judge(bits, build())
    kinds = {alert.kind for alert in on.alerts if alert.kind.startswith("desync.")}
    assert kinds == {"desync.parameters"}
    off = settings(layer({"detectors": {"desync.parameters": False}}))
    judged = judge(bits, build(off), settings=off)
    assert not judged.of("desync.parameters")
    assert judged.checks["desync.parameters"].status == "off"
    assert judged.checks["desync.gradients"].status != "off"


def test_all_settings_of_what_is_installed_are_ours_here():
    assert detectors.installed().detectors == DETECTORS
    assert Overrides().to_json() == {"detectors": {}}
