"""Optimizers whose state something else than their steps has changed, as the ranks report it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rankscope.server.detectors.desync.incident import groups_of
from rankscope.server.detectors.mechanisms.wording import number, ranks
from rankscope.server.window import Comparison, Window

EVENT = "optimizer.state"


@dataclass(frozen=True, slots=True)
class Reset:
    """One of them.

    Attributes:
        step: before whose update it was found.
        seen: the last step after which it was as it should be.
        how: `reset`, `set back` or `written in place`.
        before, after: steps that the state says it has taken; None where it does not.
        again: how often it has changed since the last report, a few steps apart each; 0 for the
            first time.
        renewed: the first step of a new optimizer at each step since; -1 where it was not that.
    """

    rank: int
    step: int
    seen: int
    how: str
    before: float | None = None
    after: float | None = None
    again: int = 0
    renewed: int = -1

    def __str__(self) -> str:
        counted = ""
        if self.before is not None and self.after is not None:
            counted = f": its step counter went from {number(self.before)} to {number(self.after)}"
        return (
            f"the optimizer's state was {self.how} after step {self.seen} and before the update of "
            f"step {self.step}{counted}"
        )


@dataclass(frozen=True, slots=True)
class Blame:
    """What broke, and where.

    Attributes:
        suspects, decided, groups: as of a `Divergence`.
        reported: what the suspects report of their optimizer's state, as a sentence.
    """

    stage: str
    first_step: int
    suspects: tuple[int, ...]
    decided: bool
    groups: tuple[tuple[int, ...], ...]
    reported: str = ""


@dataclass(slots=True)
class Resets:
    """Those of a run, in the order in which they were reported."""

    known: list[Reset] = field(default_factory=list)

    def take(self, window: Window) -> None:
        """Takes what the ranks report."""
        for event in window.events:
            if event.kind == EVENT:
                data = event.data
                seen = data.get("seen", event.step - 1)
                self.known.append(
                    Reset(
                        event.rank,
                        event.step,
                        seen if isinstance(seen, int) else event.step - 1,
                        str(data.get("how", "changed")),
                        _number(data.get("before")),
                        _number(data.get("after")),
                        int(_number(data.get("again")) or 0),
                        int(_number(data.get("renewed", -1)) or 0),
                    )
                )

    def blame(self, first: Comparison, last_equal: Mapping[str, int]) -> Blame:
        """Which link broke, and on which ranks, with what the ranks report of it.

        Args:
            first: the first comparison that found a difference.
            last_equal: stage -> last step at which the ranks agreed.
        """
        decided = first.decided and len(first.ranks) > 2
        made = Blame(first.stage, first.step, first.deviating, decided, groups_of(first))
        if first.stage not in ("optimizer_state", "parameters"):
            return made
        agreed = [last_equal[s] for s in (first.stage, "parameters") if s in last_equal]
        since = max(agreed, default=-1)
        found = [r for r in self.known if since < r.step <= first.step]
        who, whole = {r.rank for r in found}, {*first.deviating}
        # With no majority all are suspect, of which those that report nothing have what they
        # should.
        if not found or not (who == whole if decided else who < whole):
            return made
        groups = sorted(made.groups, key=lambda group: not who.isdisjoint(group))
        # The state is compared less often than the parameters that it moves.
        return Blame(
            stage="optimizer_state",
            first_step=min(r.step for r in found),
            suspects=tuple(sorted(who)),
            decided=True,
            groups=tuple(groups),
            reported=f"As {ranks(tuple(sorted(who)))} reported, {found[0]}.",
        )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
