"""However the steps come, the alerts are the same."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.server.alerts import causes
from rankscope.server.detectors.base import Finding
from tests.support.incidents import TimeLine, finding, timeless

LAST = 160

# Kind, key and ranks, clear_after: several that are linked with each other.
IDENTITIES = (
    ("desync.parameters", "", (1,), None),
    ("desync.gradients", "", (1,), 12),
    ("loss.nonfinite", "", (), 20),
    ("loss.spike", "", (), 7),
    ("loss.diverging", "", (), 30),
    ("rank.loss_outlier", "rank:1", (1,), 9),
    ("rank.loss_outlier", "rank:2", (2,), 0),
)

observations = st.lists(
    st.tuples(
        st.sampled_from(IDENTITIES),
        st.integers(0, LAST),
        st.integers(1, 30),
        st.sampled_from(["info", "warning", "critical"]),
        st.integers(0, 40),
    ),
    max_size=12,
)


def held(drawn: Iterable[tuple]) -> list[Finding]:
    """One finding for each step and identity at which something was wrong."""
    found = {}
    for (kind, key, ranks, clear_after), start, length, severity, back in drawn:
        for step in range(start, min(start + length, LAST + 1)):
            found[kind, key, step] = finding(
                kind,
                step,
                key=key,
                ranks=ranks,
                clear_after=clear_after,
                severity=severity,
                title=f"{severity} since {start}",
                first_step=max(start - back, 0),
            )
    return list(found.values())


def merged(findings: Iterable[Finding]) -> Iterator[Finding]:
    """As a detector gives them: what does not change from step to step is one finding."""

    def reported(f: Finding) -> tuple:
        return f.kind, f.key, f.title, f.severity, f.first_step

    for _, group in groupby(
        sorted(findings, key=lambda f: (reported(f), f.seen_step)), key=reported
    ):
        run: Finding | None = None
        for f in group:
            if run is not None and f.seen_step == run.last_step + 1:
                run = replace(run, last_step=f.seen_step)
                continue
            if run is not None:
                yield run
            run = f
        assert run is not None
        yield run


def incidents(findings: Iterable[Finding], *, after: int) -> Iterator[Finding]:
    """As a detector with a memory gives them: a whole incident each time, as it has become.

    The latest is reported again and again, as by a detector that sees nothing of its end.
    """
    ordered = sorted(findings, key=lambda f: (f.kind, f.key, f.seen_step))
    for _, group in groupby(ordered, key=lambda f: (f.kind, f.key)):
        known: list[Finding] = []
        for f in group:
            last = known[-1] if known else None
            gap = math.inf if f.clear_after is None else max(f.clear_after, 1)
            if last is None or f.seen_step - last.last_step > gap:
                known.append(f)
                continue
            known[-1] = replace(f, seen_step=last.seen_step)
        yield from (f for f in known if f.last_step > after or f is known[-1])


def cut(findings: list[Finding], after: int, end: int, how: str) -> list[Finding]:
    """What is reported of the steps after `after` up to `end`."""
    if how == "incidents":
        return list(incidents([f for f in findings if f.seen_step <= end], after=after))
    block = [f for f in findings if after < f.seen_step <= end]
    return list(merged(block)) if how == "merged" else block


@settings(max_examples=300, deadline=None)
@given(
    observations,
    st.sets(st.integers(0, LAST)),
    st.sampled_from(["steps", "merged", "incidents"]),
)
def test_alerts_do_not_depend_on_how_the_steps_are_cut(drawn, cuts, how):
    found = held(drawn)
    whole, parts = TimeLine(), TimeLine()
    whole.through(LAST, *cut(found, -1, LAST, how))
    after = -1
    for end in sorted(cuts | {LAST}):
        parts.through(end, *cut(found, after, end, how))
        after = end
    assert timeless(parts.alerts.values()) == timeless(whole.alerts.values())
    # When a severity rises within one finding, nobody was notified in between.
    for what in ("opened", "resolved"):
        assert sorted(t for t in parts.told if what in t) == sorted(
            t for t in whole.told if what in t
        )


@settings(max_examples=100, deadline=None)
@given(observations)
def test_links_are_a_forest_of_two_levels(drawn):
    line = TimeLine()
    line.through(LAST, *held(drawn))
    for alert in line.alerts.values():
        if alert.parent is not None:
            assert alert.consequences == ()
            root = line.alerts[alert.parent]
            assert root.parent is None
            assert alert.id in root.consequences
        assert len(set(alert.consequences)) == len(alert.consequences)
        assert all(line.alerts[one].parent == alert.id for one in alert.consequences)


@settings(max_examples=50, deadline=None)
@given(observations, st.randoms(use_true_random=False))
def test_links_do_not_depend_on_the_order_of_the_alerts(drawn, random):
    line = TimeLine()
    line.through(LAST, *held(drawn))
    bare = [replace(a, parent=None, consequences=()) for a in line.alerts.values()]
    random.shuffle(bare)
    again = {a.id: a for a in bare} | {a.id: a for a in causes.link(bare)}
    assert again == line.alerts
    assert causes.link(tuple(line.alerts.values())) == ()
