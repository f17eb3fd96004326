"""The figures of `benchmarks/agent/__main__.py`, of step times whose answer is known."""

import numpy as np
import pytest

from benchmarks.agent import figures


def rounds_of(*, factor=1.0, hit=0.0, hit_factor=1.0, rounds=60, pairs=20):
    """Steps as gloo ranks have them: some take twice as long, and the machine changes its pace."""
    draw = np.random.default_rng(0)
    made = []
    for _ in range(rounds):
        pace = draw.lognormal(0.0, 0.2)
        arms = {}
        for name, cost in (("plain", 1.0), ("agent", factor)):
            seconds = (
                pace * cost * draw.choice((0.7, 1.0, 2.0), pairs) * draw.normal(1, 0.02, pairs)
            )
            was_hit = draw.random(pairs) < hit
            arms[name] = figures.Steps(np.where(was_hit, hit_factor, 1.0) * seconds, was_hit)
        made.append(arms)
    return made


@pytest.mark.parametrize("factor", [1.0, 1.02])
def test_the_ratio_of_neighbouring_steps_is_found(factor):
    found = figures.paired(rounds_of(factor=factor), "agent")
    assert found["pairs"] == 1200
    assert found["low"] < factor < found["high"]
    assert found["value"] == pytest.approx(factor, abs=0.006)
    assert found["high"] - found["low"] < 0.02


def test_steps_without_the_agent_that_its_threads_hit_do_not_count():
    # They fall into steps of both arms; it is the agent that they belong to.
    found = figures.paired(rounds_of(hit=0.3, hit_factor=3.0), "agent")
    spared = figures.paired(rounds_of(), "agent")
    assert spared["value"] == pytest.approx(1.0, abs=0.006)
    assert found["low"] > 1.005
    both = rounds_of(hit=0.3, hit_factor=3.0)
    unhit = [
        {n: figures.Steps(s.seconds, np.zeros(20, dtype=bool)) for n, s in r.items()} for r in both
    ]
    assert figures.paired(unhit, "agent")["value"] < found["low"]


def test_the_processor_time_of_a_step_is_that_of_the_pair():
    made = rounds_of()
    for steps in made:
        busy = np.random.default_rng(1).normal(5e-3, 1e-6, 20)
        steps["plain"].processor = busy
        steps["plain"].phases = np.stack([busy, 2 * busy], axis=1)
        # One sample in ten takes a millisecond more; all steps take 20 microseconds more, three
        # fourths of them in the second part.
        more = 2e-5 + 1e-3 * (np.arange(20) % 10 == 0)
        steps["agent"].processor = busy + more
        steps["agent"].phases = steps["plain"].phases + more[:, None] * (0.25, 0.75)
        steps["agent"].sampled = more > 1e-4
    found = figures.processor_share(made, background=1e-5, phases=("first", "second"))
    expected = {
        "first": 5.0,
        "second": 15.0,
        "step": 20.0,
        "sampled_step": 1020.0,
        "samples": 100.0,
    }
    for part, wanted in expected.items():
        assert found[part]["value"] == pytest.approx(wanted, abs=0.5)
        assert found[part]["low"] <= found[part]["value"] <= found[part]["high"]
    assert found["ratio"]["value"] == pytest.approx(1 + (2e-5 + 1e-4 + 1e-5) / 5e-3, abs=1e-4)


@pytest.mark.parametrize(
    ("sampled", "unknown"), [(True, {"step", "first"}), (False, {"sampled_step"})]
)
def test_where_no_step_is_of_a_kind_nothing_is_said_of_it(sampled, unknown):
    made = rounds_of()
    for steps in made:
        for name, one in steps.items():
            one.processor = np.full(20, 5e-3 if name == "plain" else 6e-3)
            one.phases = one.processor[:, None]
            one.sampled = np.full(20, sampled)
    found = figures.processor_share(made, background=0.0, phases=("first",))
    assert {name for name, figure in found.items() if figure is None} == unknown
    assert all(np.isfinite(list(f.values())).all() for f in found.values() if f is not None)


def test_a_draw_without_a_sample_is_no_sample_for_nothing():
    made = rounds_of(rounds=30)
    for number, steps in enumerate(made):
        for name, one in steps.items():
            one.processor = np.full(20, 5e-3 if name == "plain" else 6e-3)
            one.phases = one.processor[:, None]
            one.sampled = np.full(20, number == 0)
    found = figures.processor_share(made, background=0.0, phases=("first",))
    assert found["sampled_step"]["low"] == pytest.approx(1000.0)


def test_what_the_threads_do_to_a_step_is_distinguished_from_what_is_slow_anyway():
    draw = np.random.default_rng(0)
    stretches, samples = [], []
    for _ in range(2):
        seconds = 0.01 * np.where(draw.random(20_000) < 0.1, 1.5, draw.normal(1, 0.02, 20_000))
        hit = draw.random(20_000) < 0.01
        tiers = np.where(draw.random(20_000) < 0.004, 1, 0) + (draw.random(20_000) < 0.002) * 2
        stretches.append(
            figures.Steps(
                seconds * np.where(hit, 1.15, 1.0) * (1 + 0.05 * (tiers > 0) + 0.25 * (tiers > 1)),
                hit,
                # A tenth of a step where it works, and every fifth time three tenths.
                worked=0.01 * hit * np.where(np.arange(len(hit)) % 5, 0.1, 0.3),
            )
        )
        samples.append(tiers)
    found = figures.slow_alone(stretches, samples)
    assert found["hit"]["value"] == pytest.approx(10, abs=1.5)
    assert found["hit_length"]["low"] < 1.15 < found["hit_length"]["high"]
    # A tenth of all steps is slow; 15 % more make hardly another one slow.
    assert found["slow"]["value"] < 1.0
    assert found["overworked"]["value"] == pytest.approx(found["hit"]["value"] / 5, abs=0.5)
    # Looks of the first kind take 5 % of a step, those beyond 30 %.
    assert found["over_limit"]["value"] == pytest.approx(2.0, abs=0.4)
    assert found["sampled_length"]["value"] == pytest.approx(1.05, abs=0.01)
