"""What ranks have loaded from a checkpoint is not what was saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.effects import EPISODE, Rule
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.wording import agree, count, listing, ranks
from rankscope.server.window import Check, Occurrence, Window

_KIND = "checkpoint.mismatch"
_EVENT = "checkpoint"
# Tensors that a sentence names: the alert has the others.
_MOST_NAMES = 5
# What is kept of what an agent says: loads of all ranks, names of tensors and characters of each,
# and what is said of the save.
_MOST_LOADS, _MOST_KEPT, _LONGEST_PATH = 4096, 20, 200
_SAVED = ("step", "rank", "world_size")


@dataclass(slots=True)
class Loaded:
    """A load of one rank of which tensors are not as saved.

    Attributes:
        step: the step before which it was loaded.
        path: of the checkpoint.
        tensors: how many differ, and how many were compared.
        names: the first of those that differ.
        saved: `run`, `step`, `rank` and `world_size` of the save.
    """

    rank: int
    step: int
    path: str
    tensors: tuple[int, int]
    names: tuple[str, ...]
    saved: Mapping[str, Any]


@dataclass(slots=True)
class CheckpointState:
    """What is remembered: whether anything was compared, and what is not as saved.

    Attributes:
        loaded: rank and path -> the load.
    """

    compared: bool = False
    reported: bool = False
    loaded: dict[tuple[int, str], Loaded] = field(default_factory=dict)


class CheckpointMismatch(Detector[CheckpointState]):
    """A rank has loaded a checkpoint, and holds other bits than were saved.

    A file was damaged or written over on its way (a copy that broke off, a disk, another job with
    the same path), a shard is of another save, or the state was changed between the load and the
    first step.

    Statistic:
        None: each rank compares the digests of what it holds after a load with those that were
        recorded when it was saved (`monitor.checkpoint`). A change of one word of 32 bits always
        changes a digest. Tensors that were converted, have another shape or are sharded in
        another way are not compared.

    Severity:
        Critical.

    Evidence:
        `path`, `saved` (run, step and rank of the save), `differing` and `compared` (tensors, by
        rank).

    Source:
        `rankscope verify` names the elements; silent corruption of data: Bairavasundaram et al.
        2008, "An analysis of data corruption in the storage stack".
    """

    kinds = (_KIND,)
    lasting = "it stays in the parameters until another checkpoint is loaded"
    effects = (
        Rule(
            root=(_KIND,),
            consequence=("desync.", "loss.", "update.", "generalization.gap"),
            earliest=-EPISODE,
            same_ranks=False,
            why="the training goes on from another state than was saved",
        ),
    )

    def advance(self, window: Window, state: CheckpointState) -> Outcome:
        """Takes what ranks report of their loads."""
        for event in sorted(window.events, key=lambda e: (e.step, e.rank)):
            if event.kind == _EVENT:
                _take(event, state)
        loads = sorted({(one.step, one.path) for one in state.loaded.values()})
        findings = tuple(
            _finding(
                [one for one in state.loaded.values() if (one.step, one.path) == load],
                window.last_step,
            )
            for load in loads
        )
        return Outcome({_KIND: _check(state)}, findings)


def _take(event: Occurrence, state: CheckpointState) -> None:
    said = event.data
    state.reported = True
    if said.get("loaded") is not True or not (compared := _number(said.get("tensors"))):
        return
    state.compared = True
    path = str(said.get("path", ""))[:_LONGEST_PATH]
    # A model and its optimizer may be two files of one load; another load takes the place of both.
    for known in [k for k, one in state.loaded.items() if k[0] == event.rank]:
        if known[1] == path or state.loaded[known].step < event.step:
            del state.loaded[known]
    differing = _number(said.get("differing"))
    if not differing or len(state.loaded) >= _MOST_LOADS:
        return
    names, saved = said.get("names"), said.get("saved")
    of_save = saved if isinstance(saved, Mapping) else {}
    state.loaded[event.rank, path] = Loaded(
        event.rank,
        event.step,
        path,
        (differing, compared),
        tuple(str(name)[:_LONGEST_PATH] for name in names[:_MOST_KEPT])
        if isinstance(names, list | tuple)
        else (),
        {key: of_save[key] for key in _SAVED if isinstance(of_save.get(key), int)}
        | {"run": str(of_save.get("run", ""))[:_LONGEST_PATH]},
    )


def _number(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _check(state: CheckpointState) -> Check:
    if state.loaded:
        return Check.open("Other bits were loaded than were saved.")
    if state.compared:
        return Check.ok("What was loaded is what was saved, wherever it was compared.")
    if state.reported:
        return Check.missing("Checkpoints were saved, and none was loaded and compared.")
    return Check.missing(
        "Nothing says what is saved and loaded: call `monitor.checkpoint` after both."
    )


def _finding(loaded: list[Loaded], last_step: int) -> Finding:
    first = loaded[0]
    who = tuple(sorted(one.rank for one in loaded))
    names = tuple(dict.fromkeys(name for one in loaded for name in one.names))
    differing, compared = max(one.tensors for one in loaded)
    what = listing([f"`{name}`" for name in names], most=_MOST_NAMES)
    step = first.saved.get("step")
    after = f" after step {step}" if isinstance(step, int) else ""
    text = f"{ranks(who)} {agree(len(who), 'has')} loaded other bits than were saved"
    file = crc32(first.path.encode(errors="replace"))
    record = f"{first.path.rstrip('/')}.digests/rank_{first.saved.get('rank', first.rank)}.json"
    return Incident.since(first.step, last_step).finding(
        kind=_KIND,
        key=f"step:{first.step}:{file:08x}",
        severity="critical",
        title=f"{text[:1].upper()}{text[1:]}: {count(differing, 'tensor')} of {compared}",
        ranks=who,
        tensors=names,
        stage="start",
        cause=(
            f"Of `{first.path}`, saved{after}, {what} {agree(differing, 'has')} digests other than "
            "those that were recorded when it was saved: the file was damaged or written over "
            "since, a shard of it is of another save, or the state was changed after the load."
        ),
        remedy=(
            f"Compare the file with what was saved: `rankscope verify {first.path} {record}`. "
            "Where it differs, load an earlier checkpoint; where it is the same, look for what "
            "changes these tensors between the load and the first step."
        ),
        evidence={
            "path": first.path,
            "saved": dict(first.saved),
            "differing": {str(one.rank): one.tensors[0] for one in loaded},
            "compared": {str(one.rank): one.tensors[1] for one in loaded},
        },
    )
