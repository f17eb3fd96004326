"""Which of the events of all series are one, and what a person reads of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.effects import BLUR
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.wording import count, number, ranks, sentences
from rankscope.server.detectors.metric.found import Event

# What says most of what happened comes first.
_ORDER = ("shift", "recurring", "silence", "spikes", "level", "outlier", "spike")
_LISTED = 16


@dataclass(slots=True, kw_only=True)
class Anomaly(Incident):
    """What began at about the same step, or goes on at the same ranks.

    Attributes:
        events: by series and question.
        silent: series that are not posted: name, rank, and since when.
    """

    events: dict[tuple[str, str], Event] = field(default_factory=dict)
    silent: set[tuple[str, int, int]] = field(default_factory=set)
    world: int = 1
    key: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The suspect ranks; empty where it is about all."""
        named = sorted({rank for event in self.events.values() for rank in event.ranks})
        return tuple(named) if self.world <= 1 or len(named) < self.world else ()

    def holds(self, event: Event) -> bool:
        """Whether an event belongs to it."""
        known = {rank for one in self.events.values() for rank in one.ranks}
        same = known == set(event.ranks) or bool(known & set(event.ranks))
        return same or abs(event.first_step - self.first_step) <= BLUR

    def add(self, name: str, event: Event, calm: int) -> None:
        """Takes one more event."""
        known = self.events.get((name, event.question))
        if known is not None and known.extreme and not event.extreme:
            # It has been extreme; what shows less of it now does not take that back.
            event = known
        self.events[name, event.question] = event
        self.last_step = max(self.last_step, event.seen_step)
        self.clear_after = max(self.clear_after, calm)
        # A single value dates nothing back that lasts.
        if event.question not in ("outlier", "spike"):
            self.first_step = min(self.first_step, event.first_step)


def finding(anomaly: Anomaly) -> Finding:
    """The alert."""
    ordered = sorted(
        anomaly.events.items(),
        key=lambda item: (
            not item[1].extreme,
            _ORDER.index(item[1].question),
            item[1].first_step,
            item[0][0],
        ),
    )
    (name, _), main = ordered[0]
    names = list(dict.fromkeys(name for (name, _), _ in ordered))
    more = f", and {len(names) - 1} more series" if len(names) > 1 else ""
    who = anomaly.ranks
    return anomaly.finding(
        kind="metric.anomaly",
        severity="warning" if any(event.extreme for _, event in ordered) else "info",
        title=_title(_short(name), main, who) + more,
        key=anomaly.key,
        ranks=who,
        cause=sentences(_what(main, anomaly.world), _why(main)),
        remedy=_remedy(_short(name), main, who),
        evidence={
            "question": main.question,
            "times": main.times,
            "size": main.size,
            "usual": main.usual,
            **({"period": main.period} if main.period else {}),
            "series": {
                name: {
                    "question": event.question,
                    "first_step": event.first_step,
                    "ranks": list(event.ranks),
                    "times": event.times,
                    "size": event.size,
                    "usual": event.usual,
                }
                for (name, _), event in reversed(ordered[:_LISTED])
            },
        },
    )


def _short(name: str) -> str:
    return f"`{name if len(name) <= 40 else name[:37] + '...'}`"


def _title(name: str, main: Event, who: tuple[int, ...]) -> str:
    of = f" of {ranks(who)}" if who else ""
    step = main.first_step
    side = "above" if main.size > 0 else "below"
    by = number(abs(main.size))
    often = f"every {main.period} steps" if main.period else "again and again"
    return {
        "shift": f"{name}{of} lies {by} {side} the other ranks' since step {step}",
        "recurring": f"{name}{of} is far from the other ranks' {often} since step {step}",
        "silence": f"{name}{of} has not been posted since step {step}",
        "spikes": f"{name}{of} jumps by {by} {often} since step {step}",
        "level": f"{name}{of} has moved from {number(main.usual)} by {number(main.size)} "
        f"since step {step}",
        "outlier": f"{name}{of} lies {by} {side} the other ranks' at step {step}",
        "spike": f"{name}{of} jumped from {number(main.usual)} by {number(main.size)} "
        f"at step {step}",
    }[main.question]


def _what(main: Event, world: int) -> str:
    far = f"{number(main.times)} times as far"
    if main.question == "shift":
        if main.from_start:
            return f"Since the first steps the rank has been {far} from the median as the next one."
        return f"That is {far} as any rank had moved against the others before."
    if main.question == "silence":
        others = "other series of the same rank are still posted"
        if main.ranks and world > 1 and main.extreme:
            others += ", and the other ranks post this one"
        return f"It had been posted {count(main.count, 'time')}, and {others}."
    if main.question == "recurring":
        return (
            f"{count(main.count, 'value')} of the last steps stand out by {number(main.times)} "
            "standard deviations, and all are of this rank."
        )
    if main.question == "spikes":
        return (
            f"There were {count(main.count, 'jump')} at equal distances, of {number(main.times)} "
            "standard deviations of the steps in between."
        )
    if main.question == "level":
        return (
            f"It stays there, and the move is {number(main.times)} times the range in which it "
            "had been."
        )
    return f"That is {far} as any value had been before."


def _why(main: Event) -> str:
    return {
        "shift": "Possibly the rank reads other data, runs other code or settings, or computes on "
        "a faulty device.",
        "recurring": "Possibly something recurs on this rank alone: a source of its data, a "
        "loader worker, a branch that depends on the rank.",
        "silence": "Possibly the branch that logs it is no longer reached, or what it is computed "
        "from is no longer there.",
        "spikes": "Something that recurs with this period causes it: one of several data "
        "sources, or a penalty or evaluation at these steps; or it is intended.",
        "level": "Possibly the training has entered another phase: other data, another setting, or "
        "something it has learned or lost.",
        "outlier": "Possibly the batch of this rank was an odd one.",
        "spike": "Possibly the batches of this step were odd ones.",
    }[main.question]


def _remedy(name: str, main: Event, who: tuple[int, ...]) -> str:
    of = f" of {ranks(who)}" if who else ""
    if main.question == "silence":
        return (
            f"Look at where {name} is logged{of}, and at what happened at step {main.first_step}."
        )
    where = f"from step {main.first_step} on"
    if main.question in ("outlier", "spike"):
        where = f"at step {main.first_step}"
    if main.period:
        where = f"at steps {main.first_step}, {main.first_step + main.period}, ..."
    beside = " beside that of another rank" if who else ""
    return f"Look at what goes into {name}{of} {where}{beside}."
