"""Digests of a checkpoint, kept beside it: what is loaded is what was saved, on every rank.

`monitor.checkpoint(path, state)` writes the digests of the tensors that this rank has saved into
`PATH.digests/rank_N.json`; `monitor.checkpoint(path, state, loaded=True)` compares those of what
this rank has loaded with them. The digests are those of the fingerprints and of `rankscope verify`,
which reads these files, too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankscope.agent.fingerprint.plan import digest_of
from rankscope.agent.model.facts import held
from rankscope.agent.model.state_names import aligned, leaves, unfit

FORMAT = "rankscope digests 1"
SUFFIX = ".digests"
FILE = re.compile(r"rank_(\d+)\.json")
# Names that an event has of what differs, or could not be compared.
_MOST_NAMES = 20


class NoRecord(Exception):
    """There is nothing to compare with, or nowhere to write it: why."""


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """What is kept of one tensor.

    Attributes:
        dtype: type of its elements, without `torch.`.
        shape: of what the rank holds of it.
        layout: which part of the whole that is; empty where it is all of it.
        digest: of its bits in logical order, as 16 hexadecimal digits.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str
    digest: str


@dataclass(frozen=True, slots=True)
class Place:
    """Who saves or loads, and when.

    Attributes:
        run: in which run.
        step: after how many steps of it.
        rank: which rank.
        world_size: of how many.
    """

    run: str
    step: int
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Record:
    """What one rank has saved.

    Attributes:
        at: by whom and when.
        tensors: by dotted name.
        unread: dotted name -> why there is no digest of a tensor.
    """

    at: Place
    tensors: Mapping[str, RecordedTensor]
    unread: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """What `monitor.checkpoint` returns.

    Attributes:
        path: of the checkpoint, as it was given.
        loaded: whether what was loaded was compared; else what was saved was recorded.
        saved: by whom and when it was saved, by the record; None where there is no record.
        tensors: how many were recorded, or compared.
        differing: names of those whose bits are not those that were saved, in their order.
        unchecked: name -> why it was not compared (another shape, say); without a name: why nothing
            was.
    """

    path: str
    loaded: bool
    saved: Place | None
    tensors: int
    differing: tuple[str, ...] = ()
    unchecked: Mapping[str, str] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether all that was loaded was compared, and is what was saved."""
        return self.loaded and self.tensors > 0 and not self.differing and not self.unchecked

    def __str__(self) -> str:
        file = os.path.basename(self.path.rstrip("/")) or self.path
        if not self.loaded:
            return f"{file} was saved, with the digests of {self.tensors:,} tensors"
        if self.saved is None:
            return f"{file} was loaded, and not compared: {self.unchecked.get('', '')}"
        what = f"{file}, saved after step {self.saved.step}, was loaded"
        if self.differing:
            return f"{what}: {len(self.differing):,} of {self.tensors:,} tensors are not as saved"
        left = f", {len(self.unchecked):,} were not compared" if self.unchecked else ""
        return f"{what}: {self.tensors:,} tensors are as saved{left}"

    def data(self) -> dict[str, Any]:
        """What the server is told of it, JSON-able."""
        about: dict[str, Any] = {
            "path": self.path[-200:],
            "loaded": self.loaded,
            "tensors": self.tensors,
            "differing": len(self.differing),
            "names": [name[-200:] for name in self.differing[:_MOST_NAMES]],
            "unchecked": len(self.unchecked),
            "why": next(iter(self.unchecked.values()), "")[:200],
        }
        if self.saved is not None:
            about["saved"] = asdict(self.saved)
        return about


def checkpoint(path: str, state: Any, at: Place, *, loaded: bool) -> CheckpointReport:
    """Records what was saved, or compares what was loaded; see `Monitor.checkpoint`."""
    now = recorded(state, at)
    try:
        if loaded:
            return compared(path, found(path, at.rank), now)
        write(path, now)
    except (NoRecord, OSError) as error:
        return CheckpointReport(path, loaded, None, 0, (), {"": str(error)})
    return CheckpointReport(path, False, at, len(now.tensors), (), now.unread)


def recorded(state: Any, at: Place) -> Record:
    """The digests of all tensors of a state, as this rank holds it.

    Waits for the device that they are on, as saving them does.

    Args:
        state: nested dicts and lists of tensors (`{"model": model.state_dict(), ...}`).
    """
    tensors: dict[str, RecordedTensor] = {}
    unread: dict[str, str] = {}
    for name, leaf in leaves("", state):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            try:
                leaf = torch.from_numpy(np.array(leaf, order="C"))
            except (TypeError, ValueError) as error:
                # A byte order, or a type, that torch does not have.
                unread[name] = str(error)[:200]
                continue
        if not isinstance(leaf, torch.Tensor):
            continue
        own = held(leaf)
        if why := unfit(own):
            unread[name] = why
            continue
        try:
            digest = digest_of(own)
        except (RuntimeError, TypeError, AttributeError) as error:
            # Of a framework's own kind of tensor, which has no memory that could be read.
            unread[name] = f"its bits cannot be read: {' '.join(str(error).split())[:100]}"
            continue
        tensors[name] = RecordedTensor(
            str(own.dtype).removeprefix("torch."),
            tuple(own.shape),
            _layout(leaf, own),
            f"{digest:016x}",
        )
    return Record(at, tensors, unread)


def write(path: str | os.PathLike[str], record: Record) -> Path:
    """Writes a record beside the checkpoint; whoever reads it meanwhile reads the one before.

    Raises:
        NoRecord: the path is none of a file system.
        OSError: it cannot be written.
    """
    folder = _folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank_{record.at.rank}.json"
    part = folder / f".{file.name}.{os.getpid()}"
    content = {
        "format": FORMAT,
        **asdict(record.at),
        "tensors": {
            name: [one.dtype, list(one.shape), one.layout, one.digest]
            for name, one in record.tensors.items()
        },
        "unread": dict(record.unread),
    }
    try:
        part.write_text(json.dumps(content), encoding="utf-8")
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return file


def read(file: Path) -> Record:
    """A record that `write` has written.

    Raises:
        NoRecord: it is none.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(file.read_bytes())
        if content["format"] != FORMAT:
            raise NoRecord(f"{file}: of another version of Rankscope ({content['format']!r})")
        return Record(
            Place(
                str(content["run"]),
                int(content["step"]),
                int(content["rank"]),
                int(content["world_size"]),
            ),
            {
                name: RecordedTensor(str(dtype), tuple(map(int, shape)), str(layout), str(digest))
                for name, (dtype, shape, layout, digest) in content["tensors"].items()
            },
            dict(content["unread"]),
        )
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise NoRecord(f"{file}: no record of digests, or damaged") from error


def found(path: str | os.PathLike[str], rank: int) -> Record:
    """The record that what a rank has loaded is to be compared with.

    That is its own. Where it has none of that save (rank 0 alone has saved), it is that of the
    lowest rank that has one.

    Raises:
        NoRecord: there is none.
        OSError: it cannot be read.
    """
    folder = _folder(path)
    names = os.listdir(folder) if folder.is_dir() else []
    there = {int(match[1]): folder / name for name in names if (match := FILE.fullmatch(name))}
    if not there:
        raise NoRecord(f"no digests were recorded when it was saved (there is no {folder.name})")
    first = read(there[min(there)])
    if rank not in there or rank == first.at.rank:
        return first
    own = read(there[rank])
    # Left by an earlier save of more ranks to the same path.
    is_of_that_save = (own.at.run, own.at.step) == (first.at.run, first.at.step)
    return own if is_of_that_save else first


def compared(path: str, saved: Record, now: Record) -> CheckpointReport:
    """What was loaded beside what was saved.

    Only bits that are others are differences. A tensor that was converted, is another part of the
    whole, or is on one side alone was not compared: to do that can be meant.
    """
    differing: list[str] = []
    unchecked = {**saved.unread, **now.unread}
    number = 0
    for name, (before, after) in aligned([list(saved.tensors), list(now.tensors)]):
        if name in unchecked:
            continue
        if after is None:
            unchecked[name] = "it was saved, and is not in what was loaded"
        elif before is None:
            unchecked[name] = "it was not saved"
        elif why := _apart(saved.tensors[before], now.tensors[after]):
            unchecked[name] = why
        else:
            number += 1
            if saved.tensors[before].digest != now.tensors[after].digest:
                differing.append(name)
    if not number and not unchecked:
        unchecked[""] = "there are no tensors in it"
    return CheckpointReport(path, True, saved.at, number, tuple(differing), unchecked)


def _apart(saved: RecordedTensor, now: RecordedTensor) -> str:
    """Why two tensors cannot be compared by their digests; empty where they can."""
    if saved.layout != now.layout:
        return "it is sharded in another way than when it was saved"
    if saved.shape != now.shape:
        return f"its shape is {list(now.shape)}, and was {list(saved.shape)}"
    if saved.dtype != now.dtype:
        return f"its type is {now.dtype}, and was {saved.dtype}"
    return ""


def _layout(whole: torch.Tensor, own: torch.Tensor) -> str:
    """Which part of a tensor a rank holds: its place in the mesh, and what is sharded over it."""
    if own is whole:
        return ""
    mesh = getattr(whole, "device_mesh", None)
    if mesh is None:
        return f"a part of {list(whole.shape)}"
    place = tuple(mesh.get_coordinate() or ())
    return f"{place} of {tuple(mesh.shape)}, {getattr(whole, 'placements', '')}"[:500]


def _folder(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    if "://" in text:
        raise NoRecord(f"{text}: digests are kept beside checkpoints of a file system alone")
    return Path(text.rstrip("/" + os.sep) + SUFFIX)
