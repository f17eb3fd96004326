"""What the training thread publishes for the sender thread, without ever waiting for it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import msgpack

from rankscope.agent import wire

_DIGEST = 2**64 - 1
_FLOAT = {float}
_LARGEST_STEP = wire.limits.STEP.most

# An entry is (kind, step, content).
_Entry = tuple[str, int, Any]
# After this number of entries sorted in one go, the sender pauses: whoever holds the interpreter's
# lock for long makes one step of the training as much longer, and waking up again another one.
ENTRIES_A_GO = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """What a batch is made of.

    Attributes:
        rows: each step once: step, metric -> float. Of two values the later one stands.
        word_rows: likewise: step, stage -> 64 bits, without a sign.
        through_step: last step that is complete with this and what was drained before, -1 before
            the first.
        more: whether something was left for the next batch.
    """

    rows: tuple[wire.Row, ...] = ()
    word_rows: tuple[wire.Row, ...] = ()
    fingerprints: tuple[wire.Fingerprint, ...] = ()
    layers: tuple[wire.Layers, ...] = ()
    events: tuple[wire.Event, ...] = ()
    through_step: int = -1
    more: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to say but the step."""
        return not (self.rows or self.word_rows or self.fingerprints or self.layers or self.events)


class Records:
    """Facts on their way from the training thread to the sender thread.

    Every call that publishes is O(1), takes no lock and never raises for what it is given: what
    cannot be sent is found when it is drained, dropped there and counted. Calls may come from
    several threads; `drain` from one.

    Args:
        limit: facts (scalars, model digests, events) that may wait; beyond it the oldest are
            dropped.
        fingerprint_bytes: bytes of fingerprints that may wait; beyond it the oldest are dropped.

    Attributes:
        stopped: nothing is taken any more.
    """

    def __init__(self, limit: int = 200_000, *, fingerprint_bytes: int = 64 * 2**20) -> None:
        self._fingerprint_bytes = fingerprint_bytes
        self._entries: deque[_Entry] = deque()
        # A fingerprint waits in a cell, and whoever takes it out of the cell owns it: the sender,
        # or the training thread that has to make room. Both may try at the same time.
        self._cells: deque[deque[wire.Fingerprint]] = deque()
        # Each thread counts on its own, because `+=` on a shared number loses counts and a lock
        # would make the training thread wait.
        self._published: dict[int, int] = {}
        self._evicted: dict[int, int] = {}
        self._lost: dict[tuple[int, str], int] = {}
        self._taken = 0
        # Up to where the steps are complete with what has been published, with what is being
        # drained (`_target` entries are still to be taken for that), and with what is drained.
        self._completed = self._promised = self._through = -1
        self._target = 0
        # So few entries cannot hold too much, and need not be counted at every step: only at every
        # 16th, before which the others must find room.
        self._free = limit // 1000
        self._room = limit - limit // 64 if self._free else limit
        self.stopped = False
        # Names that the wire takes; few, as a rule, and the same again and again.
        self._names: set[str] = set()

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Values of metrics at a step; the mapping is not to be changed afterwards."""
        # As `_publish`, without the call: this is done at every step.
        if self.stopped:
            self.lose("closed", len(values))
            return
        thread = get_ident()
        self._published[thread] = self._published.get(thread, 0) + len(values)
        entries = self._entries
        entries.append(("scalars", step, values))
        count = len(entries)
        if count > self._free and not (self._free and count & 15):
            self._make_room(thread)

    def digests(self, step: int, digests: Mapping[str, int]) -> None:
        """Digests of the whole model at stages of a step: 64 bits, signed or not.

        The mapping is not to be changed afterwards.
        """
        self._publish(("digests", step, digests), len(digests))

    def fingerprint(self, fingerprint: wire.Fingerprint) -> None:
        """Digests and sketches of one link of the chain at one step."""
        cell = deque((fingerprint,))
        self._cells.append(cell)
        self._publish(("fingerprint", 0, cell), 1)
        room = max(4, self._fingerprint_bytes // max(1, _bytes_of(fingerprint)))
        while len(self._cells) > room:
            try:
                self._cells.popleft().pop()
            except IndexError:
                continue
            self.lose("memory_full", 1)

    def layers(self, layers: wire.Layers) -> None:
        """One number for each tensor of a table at one step."""
        self._publish(("layers", 0, layers), 1 + len(layers.values) // 2)

    def event(self, event: wire.Event) -> None:
        """Something that happened once."""
        self._publish(("event", 0, event), 1)

    def complete(self, step: int) -> None:
        """Everything about the steps up to this one has been published."""
        self._completed = max(self._completed, step)

    def stop(self) -> None:
        """Take nothing any more: nobody is left to drain it. What still comes is counted."""
        self.stopped = True

    def lose(self, reason: str, count: int) -> None:
        """Count what is given up."""
        key = (get_ident(), reason)
        self._lost[key] = self._lost.get(key, 0) + count

    @property
    def dropped(self) -> dict[str, int]:
        """Points, fingerprints and events given up since the start, by reason.

        The reasons here: `memory_full` (the sender did not come round), `closed` (published
        after the end), `not_a_number`, `bad_name`, `bad_step` and `unsendable` (what the wire
        cannot carry). The sender adds its own.
        """
        if not self._lost:
            return {}  # as nearly always
        total: Counter[str] = Counter()
        for (_, reason), count in list(self._lost.items()):
            total[reason] += count
        return dict(total)

    @property
    def waiting(self) -> int:
        """Number of facts that wait to be drained."""
        published, evicted = sum(list(self._published.values())), sum(list(self._evicted.values()))
        return published - evicted - self._taken

    def drain(
        self, max_points: int = 50_000, *, pause: Callable[[], None] = lambda: None
    ) -> Drained:
        """Take out the oldest facts, about `max_points` of them.

        Args:
            max_points: more than that wait for the next call.
            pause: called now and then, to let the training thread go on.
        """
        rows, word_rows = _Steps(), _Steps()
        names: set[str] = set()
        fingerprints: list[wire.Fingerprint] = []
        layers: list[wire.Layers] = []
        events: list[wire.Event] = []
        if not self._target:
            # In this order: what is complete has been published before.
            self._promised = self._completed
            self._target = len(self._entries)
        # Only what is there now: otherwise a fast trainer could keep this loop busy for ever.
        left, size = len(self._entries), 0
        while left and size < max_points and len(names) < wire.MAX_COLUMNS // 2:
            left -= 1
            if left and not left % ENTRIES_A_GO:
                pause()
            try:
                kind, step, content = self._entries.popleft()
            except IndexError:
                self._target = left = 0
                break
            self._target = max(self._target - 1, 0)
            weight = _weight(kind, content)
            self._taken += weight
            try:
                if kind == "scalars":
                    step, clean = self._clean(step, content)
                    rows.add(step, clean)
                    names.update(clean)
                    size += weight
                elif kind == "digests":
                    word_rows.add(*self._clean_digests(step, content))
                    size += weight
                elif kind == "layers":
                    layers.append(content)
                    size += weight
                elif kind == "event":
                    self._sort_event(events, content)
                    size += 1
                elif content:
                    try:
                        fingerprints.append(content.pop())
                    except IndexError:
                        continue
                    size += 1 + _bytes_of(fingerprints[-1]) // 16
            except (TypeError, ValueError, OverflowError, AttributeError):
                # One thing that is not what it should be must not cost all that was sorted.
                self.lose("unsendable", weight)
        if not self._target:
            self._through = self._promised
        return Drained(
            rows=tuple(rows.values.items()),
            word_rows=tuple(word_rows.values.items()),
            fingerprints=tuple(fingerprints),
            layers=tuple(layers),
            events=tuple(events),
            through_step=self._through,
            more=left > 0,
        )

    def _publish(self, entry: _Entry, weight: int) -> None:
        if self.stopped:
            self.lose("closed", weight)
            return
        thread = get_ident()
        self._published[thread] = self._published.get(thread, 0) + weight
        entries = self._entries
        entries.append(entry)
        count = len(entries)
        if count > self._free and not (self._free and count & 15):
            self._make_room(thread)

    def _make_room(self, thread: int) -> None:
        while self.waiting > self._room:
            try:
                kind, _, content = self._entries.popleft()
            except IndexError:
                break
            weight = _weight(kind, content)
            self._evicted[thread] = self._evicted.get(thread, 0) + weight
            if kind == "fingerprint":
                try:
                    content.pop()
                except IndexError:
                    continue
            self.lose("memory_full", weight)

    def _clean(self, step: int, values: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
        """What the wire takes of a row, mostly all of it as it is; the rest is counted."""
        if not _is_step(step):
            self.lose("bad_step", len(values))
            return 0, {}
        step = int(step)
        known = self._names
        if type(values) is dict and values.keys() <= known:
            if set(map(type, values.values())) <= _FLOAT:
                return step, values
        clean = {}
        for name, value in values.items():
            try:
                number = value if type(value) is float else float(value)
            except (TypeError, ValueError, OverflowError):
                self.lose("not_a_number", 1)
                continue
            if name not in known:
                # One name that the wire refuses would cost the whole batch.
                if not isinstance(name, str) or not _is_name(name):
                    self.lose("bad_name", 1)
                    continue
                if len(known) < wire.MAX_COLUMNS:
                    known.add(name)
            clean[name] = number
        return step, clean

    def _clean_digests(self, step: int, digests: Mapping[str, int]) -> tuple[int, dict[str, int]]:
        if not _is_step(step):
            self.lose("bad_step", len(digests))
            return 0, {}
        clean = {}
        for stage, digest in digests.items():
            try:
                clean[stage] = int(digest) & _DIGEST
            except (TypeError, ValueError, OverflowError):
                self.lose("unsendable", 1)
        return int(step), clean

    def _sort_event(self, events: list[wire.Event], event: wire.Event) -> None:
        try:
            msgpack.packb(dict(event.data))
        except (TypeError, ValueError, OverflowError):
            self.lose("unsendable", 1)
            return
        events.append(event)


class _Steps:
    """The values of each step, of two under one name the later."""

    def __init__(self) -> None:
        self.values: dict[int, dict[str, Any]] = {}
        self._copied: set[int] = set()

    def add(self, step: int, values: dict[str, Any]) -> None:
        if not values:
            return
        before = self.values.setdefault(step, values)
        if before is values:
            return
        if step not in self._copied:
            # What was published stays as it was.
            before = self.values[step] = dict(before)
            self._copied.add(step)
        before.update(values)


def _weight(kind: str, content: Any) -> int:
    if kind in ("scalars", "digests"):
        return len(content)
    return 1 + len(content.values) // 2 if kind == "layers" else 1


def _is_step(step: int) -> bool:
    return 0 <= step <= _LARGEST_STEP


def _is_name(name: str) -> bool:
    return 0 < len(name) <= wire.MAX_NAME_LENGTH and name.isprintable()


def _bytes_of(one: wire.Fingerprint) -> int:
    return one.digests.nbytes + (0 if one.sketches is None else one.sketches.nbytes)
