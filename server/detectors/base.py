"""What a detector is: a pure fold over windows that answers for every run.

A detector has seen every window before and remembers what it needs in a state of its own. For each
window it says what it found, and, found or not, whether it could judge at all: "not checked" never
reads as "passed".
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar, get_args, get_origin

from rankscope.server.detectors.effects import Rule
from rankscope.server.detectors.policy import Policy

# Authors of detectors look for these here.
from rankscope.server.window import Check as Check
from rankscope.server.window import Status as Status
from rankscope.server.window import Window

State = TypeVar("State")

# A fault that lasts is taken to last a tenth of the steps; of series that are recorded at some
# steps on purpose, half of them.
LASTS = 0.1
LASTS_SAMPLED = 0.5
# What is so from some step on and stays so: however far apart observations are, enough will come.
TO_THE_END = 1.0


@dataclass(frozen=True, slots=True)
class Reach:
    """What a detector has to see of what it looks for, so that it would have found it.

    Attributes:
        series: what it reads, or patterns of it as in `needs`; of several that stand for each
            other all of them. `words/<name>`, `layers/<metric>` and `reductions` for what are no
            scalars.
        observations: how many, from the first one that shows it, that it needs.
        lasts: share of the judged steps that it lasts at least; 0 for what may come and
            go within as many steps as it needs observations, a jump or a swing; 1 for
            what stays, where the observations count and not how far apart they are.
        returns: what it looks for comes again after a number of steps that is not known: whether
            it did is seen only where both steps are recorded.
        moves: `at all`: a series that never had but one value shows nothing. `from zero`: one that
            was never anything but 0 does not.
        kinds: of the detector's, that it is about; all of them where it is empty.
    """

    series: tuple[str, ...]
    observations: int = 1
    lasts: float = 0.0
    returns: bool = False
    moves: str = ""
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something wrong, held at every observation from `seen_step` to `last_step`.

    Attributes:
        kind: one of the detector's.
        key: distinguishes findings of one kind that are different incidents at the same time, for
            example `rank:2`; empty for the run as a whole.
        seen_step: first step at which the condition held in this window.
        last_step: last one; the alert resolves once `clear_after` steps later nothing was found.
        first_step: since which step it has gone wrong, as well as it can be known (an onset that
            was found later is dated back).
        ranks: the suspect ranks.
        tensors: parameter names, most relevant first.
        clear_after: steps without a finding after which it is over; None: never by itself.
        evidence: JSON-able numbers behind it, for a person and for the page.
    """

    kind: str
    severity: str
    title: str
    seen_step: int
    last_step: int
    first_step: int
    cause: str
    remedy: str
    key: str = ""
    ranks: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()
    stage: str | None = None
    clear_after: int | None = 0
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a detector says of one window.

    Attributes:
        checks: one for each of the detector's `kinds`, as it is where no finding of it is open;
            that one is says `Detector.checks`.
        findings: in the order of their steps.
    """

    checks: Mapping[str, Check]
    findings: tuple[Finding, ...] = ()


class Detector(ABC, Generic[State]):
    """Base of all detectors; the class docstring is the reference page a user reads.

    It has these sections: what it sees (first paragraph), `Statistic`, `Severity`, `Evidence`,
    `Source`.

    Args:
        policy: its thresholds; by default as they are declared.

    Attributes:
        kinds: what it can report, out of `KINDS`; a detector of another package has names of
            its own. It is set and switched off by these names; thresholds belong to the first.
        policies: the class of its thresholds; as a rule declared by `policy: ItsPolicy` alone.
        needs: series it cannot do without; the runner answers MISSING_INPUT for it where no rank
            has posted one of them by the time `grace` observations have passed.
        wants: series it reads, too, where there are any.
        min_ranks: the runner answers NOT_APPLICABLE for a smaller world.
        of_one_task: of tasks that are trained in turn it is shown the steps of the first alone: it
            goes by levels, and each task has its own.
        effects: what its kinds do to others, and others to its kinds; where a line of
            `alerts.rules` fits as well, that one holds.
        reports_open: its checks report themselves that a kind is open, as not all of its findings
            are of a run in which something is wrong.
        lasting: why a single observation is enough to find it, however far apart they are, for a
            detector that declares nothing in `reaches`.
    """

    kinds: ClassVar[tuple[str, ...]]
    policies: ClassVar[type[Policy]] = Policy
    needs: ClassVar[tuple[str, ...]] = ()
    wants: ClassVar[tuple[str, ...]] = ()
    min_ranks: ClassVar[int] = 1
    lasting: ClassVar[str] = ""
    of_one_task: ClassVar[bool] = False
    reports_open: ClassVar[bool] = False
    effects: ClassVar[tuple[Rule, ...]] = ()

    policy: Policy
    _states: ClassVar[type[Any]]

    def __init_subclass__(cls) -> None:
        """Reads off the declaration what the state is, and what the thresholds are."""
        for base in getattr(cls, "__orig_bases__", ()):
            if get_origin(base) is Detector:
                (cls._states,) = get_args(base)
        declared = inspect.get_annotations(cls).get("policy")
        if declared is not None and "policies" not in vars(cls):
            own = vars(sys.modules[cls.__module__])
            cls.policies = own[declared] if isinstance(declared, str) else declared

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or self.policies()

    @classmethod
    def of(cls, policies: Callable[[type[Detector[Any]]], Policy]) -> Self:
        """One that judges by a run's settings.

        Args:
            policies: the thresholds of any detector; of others for one that asks them.
        """
        return cls(policies(cls))

    def checks(self, outcome: Outcome, last_step: int) -> dict[str, Check]:
        """What is to be said of each kind: OPEN while a finding of it is not over at a step."""
        checks = dict(outcome.checks)
        for found in () if self.reports_open else outcome.findings:
            lasts = found.clear_after is None or last_step - found.last_step <= found.clear_after
            if lasts and checks[found.kind].status is not Status.OPEN:
                checks[found.kind] = Check.open(f"{found.title}.")
        return checks

    def reaches(self) -> tuple[Reach, ...]:
        """What it has to see of what it finds.

        Where less was recorded, the runner answers INSUFFICIENT_DATA in place of OK. Of a detector
        that finds what it looks for at any later step there is nothing to say but `lasting`.
        """
        return ()

    def start(self) -> State:
        """The state before the first window; by default that of `Detector[State]` as it is made."""
        made: State = self._states()
        return made

    @abstractmethod
    def advance(self, window: Window, state: State) -> Outcome:
        """Looks at the next block of steps, changes `state`, and answers.

        The answer to a sequence of windows must not depend on how the steps are cut into blocks.
        """
