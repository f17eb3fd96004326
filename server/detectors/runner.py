"""Runs the detectors of one run: what they cannot judge, how long they take, what they raise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankscope.server.detectors.base import Check, Detector, Finding, Status
from rankscope.server.window import Window

# A series that no rank has posted by then is not going to come: loggers of losses and norms begin
# with the first steps.
GRACE = 20

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    """A detector with what it remembers.

    Attributes:
        failure: what it raised; it is asked no more then, since its state is half changed.
    """

    detector: Detector[Any]
    state: Any
    failure: str = ""
    checks: Mapping[str, Check] = field(default_factory=dict)


class Evaluation:
    """All detectors over one run, from its first step on; one for each run, used by one thread.

    Args:
        detectors: as `rankscope.server.detectors.build` gives them.
        strict: raises what a detector raises, as tests want it.
        clock: seconds, to measure how long each takes; without it nothing is measured.

    Attributes:
        seconds: time spent so far, by name of the detector's class.
    """

    def __init__(
        self,
        detectors: Sequence[Detector[Any]],
        *,
        strict: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._running = [_Running(detector, detector.start()) for detector in detectors]
        self._strict = strict
        self._clock = clock
        self._seen: set[str] = set()
        self._observed = 0
        self.seconds = dict.fromkeys((type(d).__name__ for d in detectors), 0.0)

    @property
    def needs(self) -> frozenset[str]:
        """All series that any of the detectors looks at."""
        return frozenset(
            name
            for running in self._running
            for name in (*running.detector.needs, *running.detector.wants)
        )

    def advance(self, window: Window) -> tuple[tuple[Finding, ...], dict[str, Check]]:
        """Shows the next block of steps to all detectors.

        Returns:
            What they found, in the order of its steps, and for each kind how far it can be judged.

        Raises:
            Exception: what a detector raised, if `strict`.
        """
        self._seen |= {name for name, series in window.series.items() if series.present.any()}
        self._observed += len(window.steps)
        findings: list[Finding] = []
        checks: dict[str, Check] = {}
        for running in self._running:
            if window.world_size < running.detector.min_ranks:
                checks |= _for_all(running.detector, _not_applicable(running.detector, window))
                continue
            findings += self._ask(running, window)
            checks |= running.checks
        findings.sort(key=lambda finding: (finding.seen_step, finding.last_step))
        return tuple(findings), checks

    def _ask(self, running: _Running, window: Window) -> tuple[Finding, ...]:
        detector = running.detector
        if running.failure:
            return ()
        started = self._clock() if self._clock else 0.0
        try:
            outcome = detector.advance(window, running.state)
            _check_outcome(detector, outcome.checks, outcome.findings)
        except Exception as error:
            if self._strict:
                raise
            name = type(detector).__name__
            running.failure = f"{name} failed at step {window.last_step}: {error!r}"
            running.checks = _for_all(detector, Check(Status.ERROR, running.failure))
            _logger.exception("%s; it is left out for the rest of this run", running.failure)
            return ()
        finally:
            if self._clock:
                self.seconds[type(detector).__name__] += self._clock() - started
        # It was shown the block all the same: when a series first comes must not change what a
        # detector remembers of the steps before.
        missing = [name for name in detector.needs if name not in self._seen]
        if missing:
            running.checks = _for_all(detector, self._without(missing))
        else:
            running.checks = outcome.checks
        return outcome.findings

    def _without(self, missing: Sequence[str]) -> Check:
        names = " and ".join(missing)
        if self._observed < GRACE:
            why = f"{names} has not been posted in the first {self._observed} steps."
            return Check(Status.INSUFFICIENT_DATA, why)
        return Check(Status.MISSING_INPUT, f"No rank posts {names}.")


def _not_applicable(detector: Detector[Any], window: Window) -> Check:
    ranks = "1 rank" if window.world_size == 1 else f"{window.world_size} ranks"
    why = f"It compares at least {detector.min_ranks} ranks; this run has {ranks}."
    return Check(Status.NOT_APPLICABLE, why)


def _for_all(detector: Detector[Any], check: Check) -> dict[str, Check]:
    return dict.fromkeys(detector.kinds, check)


def _check_outcome(
    detector: Detector[Any], checks: Mapping[str, Check], findings: Sequence[Finding]
) -> None:
    """Refuses an answer that would be lost silently further on."""
    if set(checks) != set(detector.kinds):
        raise ValueError(f"it answers for {sorted(checks)} and not for {sorted(detector.kinds)}")
    foreign = {finding.kind for finding in findings} - set(detector.kinds)
    if foreign:
        raise ValueError(f"it finds {sorted(foreign)} and declares {sorted(detector.kinds)}")
