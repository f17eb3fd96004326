"""The answer of `rankscope verify`: groups of checkpoints, each compared, and what could not be."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from rankscope.agent.checkpoints.comparison import Compared, compare
from rankscope.agent.checkpoints.errors import DAMAGED, Unreadable, told
from rankscope.agent.checkpoints.opening import Checkpoint, find, pairs, role
from rankscope.agent.checkpoints.source import Source

SAME, DIFFERENT, UNCHECKED = "same", "different", "unchecked"


@dataclass(slots=True)
class Verification:
    """All that was compared.

    Attributes:
        paths: as they were given.
        replicas: whether the checkpoints are replicas, compared among each other.
        groups: member -> how the checkpoints compare there; a checkpoint that is one file has one
            member, without a name.
        missing: member -> path of the checkpoint that does not have it.
        unread: member -> why it could not be read in one of the checkpoints.
        passed_over: files that are no checkpoints.
    """

    paths: tuple[str, ...]
    replicas: bool
    groups: dict[str, Compared] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    passed_over: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """`same`, `different`, or `unchecked`: what was compared is the same, and some was not."""
        if self.missing or any(group.differences for group in self.groups.values()):
            return DIFFERENT
        if self.unread or any(group.unread for group in self.groups.values()):
            return UNCHECKED
        return SAME


def verify_pair(first: str, second: str, ignored: Sequence[str] = ()) -> Verification:
    """Compares two checkpoints.

    Args:
        first: path of the reference.
        second: path of the other.
        ignored: patterns, as of a shell, of names and members to leave out.

    Raises:
        Unreadable: one cannot be read, or nothing is left to compare.
    """
    found = find(first), find(second)
    done = Verification((first, second), replicas=False)
    done.passed_over = sorted({n for one in found for n in one.passed_over})
    for a, b in pairs(*found):
        # What has no name as it is alone has one where it is among others.
        member = a or b or ""
        if _matches(member, ignored):
            continue
        if a is None or b is None:
            done.missing[member] = (first, second)[b is None]
            continue
        _add(done, member, ("A", "B"), ((found[0], a), (found[1], b)), ignored)
    return _checked(done)


def verify_replicas(paths: Sequence[str], ignored: Sequence[str] = ()) -> Verification:
    """Compares replicas with each other: the files of one folder, or those given.

    In a folder, members whose names differ in numbers alone are replicas of each other.

    Raises:
        Unreadable: one cannot be read, or there are no replicas.
    """
    done = Verification(tuple(paths), replicas=True)
    if len(paths) > 1:
        found = [find(path) for path in paths]
        if several := [one.path for one in found if list(one.members) != [""]]:
            raise Unreadable(f"{several[0]}: a folder of several files; give it alone")
        _add(done, "", tuple(paths), tuple((one, "") for one in found), ignored)
        return _checked(done)
    (folder,) = (find(path) for path in paths)
    done.passed_over = folder.passed_over
    roles: dict[str, list[str]] = {}
    for member in folder.members:
        if not _matches(member, ignored):
            roles.setdefault(role(member), []).append(member)
    for members in roles.values():
        if len(members) > 1:
            sources = tuple((folder, member) for member in members)
            _add(done, members[0], tuple(members), sources, ignored)
        else:
            done.passed_over += members
    if not done.groups and not done.unread:
        raise Unreadable(
            f"{paths[0]}: no replicas: there are no two files whose names differ in numbers alone, "
            "like rank_0.pt and rank_1.pt; give the files themselves"
        )
    return _checked(done)


def _add(
    done: Verification,
    member: str,
    labels: tuple[str, ...],
    members: Sequence[tuple[Checkpoint, str]],
    ignored: Sequence[str],
) -> None:
    sources: list[Source] = []
    try:
        for checkpoint, own in members:
            sources.append(checkpoint.open(own).without(lambda name: _matches(name, ignored)))
        done.groups[member] = compare(labels, sources)
    except (Unreadable, *DAMAGED) as error:
        if not member:
            raise
        done.unread[member] = f"{told(error)} (or leave it out: --ignore {shlex.quote(member)})"


def _checked(done: Verification) -> Verification:
    """The same, where there is anything that it can be about."""
    empty = all(not group.digests and not group.values for group in done.groups.values())
    if empty and not done.missing and not done.unread:
        raise Unreadable(f"{' and '.join(done.paths)}: there is nothing in them to compare")
    return done


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
