"""What a path is: one checkpoint, or a folder of several (one a rank, or model and optimizer)."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rankscope.agent.checkpoints.digests_file import is_digests, open_digests
from rankscope.agent.checkpoints.distributed import (
    METADATA,
    SHARD_SUFFIX,
    files_of,
    open_distributed,
    read_metadata,
)
from rankscope.agent.checkpoints.errors import DAMAGED, Unreadable
from rankscope.agent.checkpoints.safetensors_file import (
    INDEX_SUFFIX,
    SUFFIX,
    open_indexed,
    open_safetensors,
)
from rankscope.agent.checkpoints.source import Source
from rankscope.agent.checkpoints.torch_file import is_torch_file, open_torch_file

# Of these a file that cannot be read is a checkpoint that is damaged. Others (`.bin`, `.tar`, none)
# are asked how they begin.
_SUFFIXES = frozenset((".pt", ".pth", SUFFIX))
# The member that is a folder's shards of torch.distributed.checkpoint, beside others.
WHOLE = "."
# So many folders no checkpoint has: one a rank, each with some below it.
_MOST_FOLDERS = 100_000
_DIGITS = re.compile(r"\d+")


@dataclass(slots=True)
class Checkpoint:
    """What was found at a path, opened when it is read.

    Attributes:
        path: as it was given.
        members: path inside the folder -> what opens it; a file, and a folder that is a whole,
            have one member, without a name. Shards of torch.distributed.checkpoint have that of
            their folder, `.` beside other members of the uppermost.
        passed_over: files of the folder that are no checkpoints.
    """

    path: str
    members: dict[str, Callable[[], Source]]
    passed_over: list[str] = field(default_factory=list)

    def open(self, member: str) -> Source:
        """One of the members.

        Raises:
            Unreadable: it is missing in part, damaged, or would run code.
        """
        try:
            return self.members[member]()
        except DAMAGED as error:
            where = os.path.join(self.path, member) if member else self.path
            raise Unreadable(f"{where}: damaged or cut off ({error!r})") from error


def find(path: str) -> Checkpoint:
    """What a path is; nothing is loaded yet.

    Raises:
        Unreadable: there is nothing, or nothing that could be a checkpoint.
    """
    place = Path(path)
    try:
        if place.is_dir():
            return _folder(path, place)
        if place.is_file():
            return Checkpoint(path, {"": partial(_open_file, place)})
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror or error}") from error
    raise Unreadable(f"{path}: there is no such file or folder")


def role(member: str) -> str:
    """What the members of all ranks have in common: their name without its numbers."""
    return _DIGITS.sub("*", os.path.splitext(member)[0])


def pairs(first: Checkpoint, second: Checkpoint) -> list[tuple[str | None, str | None]]:
    """Which members of two checkpoints belong together; None where one has no such member.

    Those of the same name do, then those whose names say the same but for how they are written
    (`rank_0.pt` and `rank0`); and two that are alone.
    """
    if len(first.members) == len(second.members) == 1:
        return list(zip(first.members, second.members, strict=True))
    spelled = _by_spelling(second, first)
    mine = _by_spelling(first, second)
    found: list[tuple[str | None, str | None]] = []
    for name in first.members:
        key = _spelling(name)
        same = name if name in second.members else spelled.get(key) if key in mine else None
        found.append((name, same))
    taken = {other for _, other in found}
    return [*found, *((None, name) for name in second.members if name not in taken)]


def _by_spelling(one: Checkpoint, other: Checkpoint) -> dict[str, str]:
    """Spelling -> the only member of that spelling among those that the other does not have."""
    left = [name for name in one.members if name not in other.members]
    number = Counter(map(_spelling, left))
    return {_spelling(name): name for name in left if number[_spelling(name)] == 1}


def _spelling(name: str) -> str:
    """A member's name without suffix, capitals, signs and leading zeros."""
    plain = _DIGITS.sub(lambda m: str(int(m[0])), os.path.splitext(name)[0])
    return re.sub(r"[^a-z0-9/]", "", plain.lower())


def _folder(path: str, place: Path) -> Checkpoint:
    found = Checkpoint(path, {})
    stored: set[str] = set()
    for folder, files in _folders(place):
        _add_folder(found, place, folder, files, stored)
    if len(found.members) == 1:
        ((name, opened),) = found.members.items()
        if name == WHOLE or name.endswith(INDEX_SUFFIX):
            found.members = {"": opened}
    if not found.members:
        raise Unreadable(
            f"{path}: in this folder there is no checkpoint: no file of torch.save or safetensors, "
            f"and no {METADATA} of torch.distributed.checkpoint"
        )
    return found


def _folders(top: Path) -> Iterator[tuple[Path, list[str]]]:
    """All folders, links to folders among them, with the names of their files, both sorted.

    Raises:
        OSError: one cannot be read.
        Unreadable: they are too many, as links that lead to links can make them.
    """
    number = 0
    # Each with where it really is, and those above it are: what leads back there is not entered.
    start = os.path.realpath(top)
    left = [(top, start, frozenset((start,)))]
    while left:
        folder, place, above = left.pop()
        with os.scandir(place) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        yield folder, [entry.name for entry in found if not entry.is_dir()]
        for entry in reversed(found):
            if not entry.is_dir():
                continue
            real = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
            if real not in above:
                left.append((folder / entry.name, real, above | {real}))
        if (number := number + 1) + len(left) > _MOST_FOLDERS:
            raise Unreadable(f"{top}: more than {_MOST_FOLDERS:,} folders, counting links to them")


def _add_folder(
    found: Checkpoint, top: Path, folder: Path, files: list[str], stored: set[str]
) -> None:
    """Adds the files of one folder.

    Args:
        stored: files that metadata of folders above name; those of this one are added.
    """

    def named(name: str) -> str:
        return (folder / name).relative_to(top).as_posix()

    is_distributed = METADATA in files
    if is_distributed:
        files = [name for name in files if name != METADATA]
        found.members[named("")] = _distributed(folder, stored)
    files = [name for name in files if os.path.normpath(folder / name) not in stored]
    shards = [name for name in files if name.endswith(SHARD_SUFFIX)]
    if shards and not is_distributed:
        raise Unreadable(
            f"{folder}: {len(shards)} shards of torch.distributed.checkpoint, and no {METADATA}, "
            "which the save writes last: it has not ended"
        )
    # Beside metadata they are of an earlier save, which they no longer name.
    found.passed_over += map(named, shards)
    indices = [n for n in files if n.endswith(INDEX_SUFFIX)]
    # `model-00001-of-00002.safetensors`, beside `model.safetensors.index.json`.
    shard_names = [
        re.compile(rf"{re.escape(stem)}-\d+-of-\d+{re.escape(suffix)}")
        for stem, suffix in (os.path.splitext(n.removesuffix(INDEX_SUFFIX)) for n in indices)
    ]
    for name in files:
        if name in shards or any(shard.fullmatch(name) for shard in shard_names):
            continue
        is_file = (folder / name).is_file()
        # A link that leads nowhere is a file that is missing; pipes and the like would block.
        is_missing = not (folder / name).exists()
        # Digests are compared where they are what was asked for, not beside what they are of.
        suffixed = Path(name).suffix in _SUFFIXES or (folder == top and is_digests(folder / name))
        if name in indices:
            found.members[named(name)] = partial(open_indexed, folder / name)
        elif (suffixed and is_missing) or (is_file and (suffixed or is_torch_file(folder / name))):
            found.members[named(name)] = partial(_open_file, folder / name)
        else:
            found.passed_over.append(named(name))


def _distributed(folder: Path, stored: set[str]) -> Callable[[], Source]:
    """What opens the shards of a folder; their files are added to those that are stored."""
    try:
        metadata = read_metadata(folder)
    except Unreadable as error:
        return partial(_refuse, error)
    stored |= files_of(folder, metadata)
    return partial(open_distributed, folder, metadata)


def _refuse(error: Unreadable) -> Source:
    raise error


def _open_file(path: Path) -> Source:
    if is_digests(path):
        return open_digests(path)
    if path.name.endswith(INDEX_SUFFIX):
        return open_indexed(path)
    if path.suffix == SUFFIX:
        return open_safetensors(path)
    return open_torch_file(path)
