"""Ranks that resumed with the weights of the others, and not with the state of their optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.wording import agree, ranks
from rankscope.server.window import Window

# Of what a rank says at attach: steps that the state of its optimizer has counted.
COUNTED_AT_ATTACH = "optimizer_steps"


@dataclass(slots=True)
class Begins:
    """The step at which each rank's newest process began.

    Attributes:
        began: of the ranks in their order; empty while they are not all known.
    """

    began: tuple[int, ...] = ()

    def changed(self, window: Window) -> tuple[int, ...] | None:
        """The steps at which they have begun together; None where that is nothing new."""
        members = window.ranks[window.members]
        if len(members) < window.world_size or not len(window.steps):
            return None
        begins = [window.begins.get(int(rank), ()) for rank in members]
        if not _started_together(begins):
            return None  # only some were started again: they catch up with the others
        began = tuple(b[-1] for b in begins)
        if began == self.began:
            return None
        self.began = began
        return began


@dataclass(frozen=True, slots=True)
class WithoutState:
    """Attributes: ranks without a state; of the others, by rank, the steps that theirs counts."""

    ranks: tuple[int, ...]
    counted: dict[int, int]

    @property
    def step(self) -> int:
        """The first step at which these are compared: the steps of the others begin there."""
        return min(self.counted.values())


def without_state(window: Window) -> WithoutState | None:
    """Ranks whose optimizer begins anew with the parameters that others resume with.

    The step at which a rank begins was read off its optimizer's state, and is 0 for some ranks;
    what they hold is, bit for bit, what those hold whose optimizer has taken steps. Nothing but a
    checkpoint gives a rank parameters that others have trained: the state was left out.
    """
    begun: dict[int, int] = {}
    for rank in window.ranks[window.members].tolist():
        counted = (window.configs.get(rank) or {}).get(COUNTED_AT_ATTACH)
        own = window.begins.get(rank, ())
        # A step that was given to `attach` is the trainer's own count, and no state's.
        if not own or own[-1] != counted or isinstance(counted, bool):
            return None
        begun[rank] = own[-1]
    without: list[int] = []
    for members in window.replicas:
        held = {rank: window.started.get(rank) for rank in members if rank in begun}
        if len(set(held.values())) > 1 or None in held.values():
            return None
        if len({begun[rank] for rank in held}) > 1:
            without += [rank for rank in held if begun[rank] == 0]
    # Those that began at further steps have states of different checkpoints.
    counted_by = {rank: step for rank, step in begun.items() if rank not in without}
    if not without or len(set(counted_by.values())) > 1:
        return None
    return WithoutState(tuple(sorted(without)), counted_by)


@dataclass(slots=True)
class Resumed:
    """What is remembered of it.

    Attributes:
        found: of the newest processes.
    """

    begins: Begins = field(default_factory=Begins)
    found: WithoutState | None = None

    def take(self, window: Window) -> None:
        """Looks at the ranks where they have begun anew."""
        if self.begins.changed(window) is not None:
            self.found = without_state(window)


def resumed_finding(found: WithoutState, last_step: int) -> Finding:
    """The finding as it stands."""
    who, others, step = ranks(found.ranks), ranks(tuple(found.counted)), found.step
    few = len(found.ranks)
    return Incident.since(step, last_step).finding(
        kind="desync.optimizer",
        key="begin",
        severity="critical",
        title=f"{who.capitalize()} resumed at step {step} without the optimizer's state",
        ranks=found.ranks,
        stage="start",
        cause=(
            f"When training began, {who} held the same parameters as {others}, bit for bit, and an "
            f"optimizer that had taken no step, where that of {others} had taken {step:,}: all "
            "ranks have the weights of the checkpoint (loaded, or broadcast by the wrapper), and "
            f"on {who} the optimizer's state was not loaded. Moments and the count of steps begin "
            f"anew there, so that {who} {agree(few, 'takes')} other steps with the same gradients. "
            f"Steps of {who} are counted from 0: those of one number do not have the same batch as "
            "the other ranks', and what else differs may come of that."
        ),
        remedy=(
            "Call `optimizer.load_state_dict` on every rank, with the checkpoint that the weights "
            "came from, before the first step; check that the file has the state on all ranks. "
            "Restart from the checkpoint: nothing repairs what has been trained since."
        ),
        evidence={
            "what": "begin",
            "values": {str(r): 0 for r in found.ranks}
            | {str(r): s for r, s in found.counted.items()},
            "decided": True,
        },
    )


def _started_together(begins: Sequence[Sequence[int]]) -> bool:
    """Whether the newest processes of all ranks were started at one time.

    All are the n-th of their rank then; of a rank that was added later, the n-th since.

    Args:
        begins: of each rank, the first steps of its processes, ascending.
    """
    most = max(map(len, begins), default=0)
    if not all(begins):
        return False
    start = min(own[0] for own in begins)
    longest = [own for own in begins if len(own) == most]
    for own in begins:
        since = max(sum(step >= own[0] for step in other) for other in longest)
        if len(own) < most and (own[0] == start or len(own) != since):
            return False
    return True
