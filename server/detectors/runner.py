"""Runs the detectors of one run: what they cannot judge, how long they take, what they raise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rankscope.agent.wire import SEVERITIES
from rankscope.server.detectors import profiles
from rankscope.server.detectors.base import Detector, Finding, Reach
from rankscope.server.detectors.mechanisms.waiting import GRACE, in_time
from rankscope.server.detectors.mechanisms.wording import agree, count, listing
from rankscope.server.detectors.profiles import (
    DESCENT,
    ENVIRONMENTS,
    FROM_REWARDS,
    IN_TURNS,
    LOGGED,
    OF_ANY_PLAYER,
    OWN_GOAL,
    PROFILES,
    TURNS,
    plain,
)
from rankscope.server.detectors.reach import Recorded
from rankscope.server.detectors.settings import Effective
from rankscope.server.detectors.tasks import SERIES as OF_TASKS
from rankscope.server.detectors.tasks import Tasks
from rankscope.server.window import Check, Status, Window, is_wanted

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    """A detector with what it remembers.

    Attributes:
        reaches: what it has to see of what it finds.
        failure: what it raised; it is asked no more then, since its state is half changed.
    """

    detector: Detector[Any]
    state: Any
    reaches: tuple[Reach, ...] = ()
    failure: str = ""
    checks: Mapping[str, Check] = field(default_factory=dict)


class Evaluation:
    """All detectors over one run, from its first step on; one for each run, used by one thread.

    Args:
        detectors: as `rankscope.server.detectors.build` gives them.
        settings: by which they were built: what is off, and the project's profile.
        failures: detectors that could not be loaded: name -> why; each is a check that failed.
        strict: raises what a detector raises, as tests want it.
        clock: seconds, to measure how long each takes; without it nothing is measured.

    Attributes:
        seconds: time spent so far, by name of the detector's class.
    """

    def __init__(
        self,
        detectors: Sequence[Detector[Any]],
        *,
        settings: Effective | None = None,
        failures: Mapping[str, str] | None = None,
        strict: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._off = settings.off if settings else frozenset[str]()
        self._profile = settings.profile if settings else None
        self._failures = dict(failures or {})
        self._strict = strict
        self._clock = clock
        self._running = [self._started(detector) for detector in detectors]
        self._recorded = Recorded(
            frozenset(n for running in self._running for r in running.reaches for n in r.series)
        )
        self._seen: set[str] = set()
        self._observed = 0
        self._last_step = -1
        # The profile that series reported, and from which step on.
        self._recognised: str | None = None
        self._recognised_at = -1
        self._tasks = Tasks()
        # The first step at which another optimizer was known to step in turns with the run's.
        self._turns_since: int | None = None
        self.seconds = dict.fromkeys((type(d).__name__ for d in detectors), 0.0)

    @property
    def needs(self) -> frozenset[str]:
        """All series that any of the detectors reads, and those that report the profile."""
        return (LOGGED | OF_TASKS).union(
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
        self._last_step = max(self._last_step, window.last_step)
        self._recorded.take(window)
        of_first = self._tasks.of_first(window)
        if self._recognised is None and (named := profiles.recognised(self._seen)):
            self._recognised, self._recognised_at = named, _first_step(window, self._seen)
        if self._turns_since is None:
            turns = [event.step for event in window.events if event.kind == TURNS]
            self._turns_since = min(turns, default=None)
        findings: list[Finding] = []
        checks: dict[str, Check] = {
            name: Check(Status.ERROR, f"it could not be loaded: {why}")
            for name, why in self._failures.items()
        }
        for running in self._running:
            if window.world_size < running.detector.min_ranks:
                checks |= _for_all(running.detector, _not_applicable(running.detector, window))
                continue
            if not running.detector.of_one_task:
                findings += self._ask(running, window)
            for part, shown in enumerate(of_first if running.detector.of_one_task else ()):
                if part and not (running.failure or _is_open(running)):
                    # Levels of before were of all tasks together. Who has found something goes on:
                    # nobody else would end it.
                    running.state = running.detector.start()
                findings += self._ask(running, shown)
            checks |= running.checks
        off = Check(Status.OFF, "The settings by which this run is judged have switched it off.")
        checks |= dict.fromkeys(self._off, off)
        findings = self._under_profile(window, findings, checks)
        findings.sort(key=lambda finding: (finding.seen_step, finding.last_step))
        return tuple(findings), checks

    def _started(self, detector: Detector[Any]) -> _Running:
        try:
            return _Running(detector, detector.start(), detector.reaches())
        except Exception as error:
            if self._strict:
                raise
            running = _Running(detector, None)
            self._give_up(running, f"{type(detector).__name__} failed at its start: {error!r}")
            return running

    def _give_up(self, running: _Running, failure: str) -> None:
        running.failure = failure
        running.checks = _for_all(running.detector, Check(Status.ERROR, failure))
        _logger.exception("%s; it is left out for the rest of this run", failure)

    def _under_profile(
        self, window: Window, findings: Sequence[Finding], checks: dict[str, Check]
    ) -> list[Finding]:
        """What is left of the findings under what the run's loss is; changes `checks`."""
        goals = [finding for finding in findings if finding.key.startswith(OWN_GOAL)]
        findings = [finding for finding in findings if not finding.key.startswith(OWN_GOAL)]
        declared, since = window.config.get("profile"), -1
        if isinstance(declared, str) and declared in PROFILES:
            name, how = declared, "the run's config declares it"
        elif self._profile is not None and self._profile in PROFILES:
            name, how = self._profile, "the project's settings declare it"
        elif self._recognised is not None:
            name, how, since = (
                self._recognised,
                "the names of its series show it",
                self._recognised_at,
            )
        else:
            name, how = DESCENT, ""
            if self._turns_since is not None:
                informing = _as_information(findings, IN_TURNS, self._turns_since)
                findings = [
                    finding if _of_any_player(finding) else informed
                    for finding, informed in zip(findings, informing, strict=True)
                ]
            if any((c or {}).get(ENVIRONMENTS) for c in window.configs.values()):
                findings = _as_information(findings, FROM_REWARDS)
        profile = PROFILES[name]
        if name == "adversarial":
            goals += [finding for finding in findings if _of_any_player(finding)]
            findings = [finding for finding in findings if not _of_any_player(finding)]
        for kind, why in profile.without.items():
            by_goal = any(finding.kind == kind for finding in goals)
            if kind in checks and kind not in self._off and not by_goal:
                text = f"Profile {name} ({how}; {profile.what}): {why}."
                checks[kind] = Check.not_applicable(text)
        return [
            replace(finding, severity="info")
            if finding.kind in profile.lenient and finding.seen_step >= since
            else finding
            for finding in findings
            if finding.kind not in self._off
            and (finding.kind not in profile.without or finding.seen_step < since)
        ] + [finding for finding in goals if finding.kind not in self._off]

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
            self._give_up(running, f"{name} failed at step {window.last_step}: {error!r}")
            return ()
        finally:
            if self._clock:
                self.seconds[type(detector).__name__] += self._clock() - started
        # It was shown the block all the same: when a series first comes must not change what a
        # detector remembers of the steps before.
        missing = [
            name.replace("*", "")
            for name in detector.needs
            if name not in self._seen
            and not ("*" in name and any(is_wanted(seen, (name,)) for seen in self._seen))
        ]
        if missing:
            running.checks = _for_all(detector, self._without(missing))
        else:
            running.checks = {
                kind: self._recorded.qualified(
                    kind, in_time(check, self._observed), running.reaches
                )
                for kind, check in detector.checks(outcome, self._last_step).items()
            }
        return outcome.findings

    def _without(self, missing: Sequence[str]) -> Check:
        names = listing(missing)
        if self._observed < GRACE:
            first = "first step" if self._observed == 1 else f"first {self._observed} steps"
            why = f"{names} {agree(len(missing), 'has')} not been posted in the {first}."
            return Check.insufficient(why)
        return Check.missing(f"No rank posts {names}.")


def _not_applicable(detector: Detector[Any], window: Window) -> Check:
    least, held = count(detector.min_ranks, "rank"), count(window.world_size, "rank")
    return Check.not_applicable(f"It compares at least {least}; this run has {held}.")


def _first_step(window: Window, names: set[str]) -> int:
    """The step at which the last of the series by which a profile is reported has come."""
    named = [
        int(window.steps[series.present.any(axis=0).argmax()])
        for name, series in window.series.items()
        if plain(name) and name in names and series.present.any()
    ]
    return max(named, default=-1)


def _as_information(
    findings: Sequence[Finding], kinds: frozenset[str], since: int = -1
) -> list[Finding]:
    """The findings, of which those of some kinds are information from a step on."""
    return [
        replace(finding, severity="info")
        if finding.kind in kinds and finding.seen_step >= since
        else finding
        for finding in findings
    ]


def _of_any_player(finding: Finding) -> bool:
    return (finding.kind, finding.key) in OF_ANY_PLAYER


def _is_open(running: _Running) -> bool:
    return any(check.status == Status.OPEN for check in running.checks.values())


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
    for finding in findings:
        if finding.severity not in SEVERITIES:
            raise ValueError(f"severity {finding.severity!r} is none of {', '.join(SEVERITIES)}")
