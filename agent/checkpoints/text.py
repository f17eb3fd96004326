"""A verification in lines of text, and as JSON."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

from rankscope.agent.checkpoints.comparison import (
    DTYPE,
    ELEMENTS,
    EXTRA,
    MISSING,
    SHAPE,
    TYPE,
    Compared,
    Difference,
)
from rankscope.agent.checkpoints.distributed import METADATA
from rankscope.agent.checkpoints.elements import ElementDifference
from rankscope.agent.checkpoints.opening import WHOLE
from rankscope.agent.checkpoints.verification import DIFFERENT, SAME, Verification

_MOST_LINES = 20
_MOST_FILES = 5


def lines(found: Verification) -> Iterator[str]:
    """The verification for a reader."""
    yield from _headline(found)
    if not found.replicas:
        for label, path in zip("AB", found.paths, strict=True):
            yield f"  {label}: {path}"
        if os.path.realpath(found.paths[0]) == os.path.realpath(found.paths[1]):
            yield "  A and B are the same path; --replicas compares the files in it with each other"
    for member, path in list(found.missing.items())[:_MOST_LINES]:
        yield f"  {_called(member)} is missing in {path}"
    yield from _alike([(m, g) for m, g in found.groups.items() if not _is_told(g)])
    told = [(m, g) for m, g in found.groups.items() if _is_told(g)]
    left = _MOST_LINES
    for member, group in told[:_MOST_LINES]:
        yield from _group(member, group, found.replicas, left)
        left = max(0, left - len(group.differences))
    if len(told) > _MOST_LINES:
        yield f"  and {len(told) - _MOST_LINES} more files: --json has all of them"
    for member, why in list(found.unread.items())[:_MOST_LINES]:
        yield f"  {_called(member)} was not compared: {why}"
    if found.passed_over:
        names = _few(found.passed_over)
        yield f"  Not compared, as they are no checkpoints or have no counterpart: {names}"


def _is_told(group: Compared) -> bool:
    """Whether there is something to say of one member alone."""
    return bool(group.differences or group.unread)


def _alike(groups: Sequence[tuple[str, Compared]]) -> Iterator[str]:
    """What is to be said of members that are the same: each line once."""
    said: dict[str, list[str]] = {}
    for member, group in groups:
        for text in _steps(group):
            said.setdefault(text, []).append(member)
    for text, members in list(said.items())[:_MOST_LINES]:
        which = f" (in {_few([*map(_called, members)])})" if len(members) < len(groups) else ""
        yield f"  {text}{which}"
    yield from _renamed(sum(group.renamed for _, group in groups), "  ")


def _renamed(number: int, indent: str) -> Iterator[str]:
    if number:
        verb = "differs" if number == 1 else "differ"
        yield (
            f"{indent}{_count(number, 'name')} {verb} in what wrappers put into them (`module.`, "
            "`_orig_mod.` and the like); that counts as the same name"
        )


def _headline(found: Verification) -> Iterator[str]:
    groups = list(found.groups.values())
    tensors = sum(len(group.digests) for group in groups)
    values = sum(group.values for group in groups)
    size = _size(sum(group.octets for group in groups))
    files = f" in {len(groups)} files each" if len(groups) > 1 else ""
    counted = f"{_count(tensors, 'tensor')} ({size}) and {_count(values, 'value')}{files}"
    if found.state == SAME:
        yield f"The same: {counted}. All digests and all values are equal."
    elif found.state == DIFFERENT:
        of_tensors = _count(sum(group.differing_tensors for group in groups), "tensor")
        of_values = _count(sum(group.differing_values for group in groups), "value")
        absent = f" {_count(len(found.missing), 'file')} missing in one." if found.missing else ""
        yield f"They differ in {of_tensors} and {of_values}, of {counted}.{absent}"
        yield from (f"  {text}" for text in _where(found))
    else:
        yield f"Not known: {counted} are the same, and something could not be compared."


def _where(found: Verification) -> Iterator[str]:
    """Sentences on what all differences have in common."""
    with_any = [m for m, group in found.groups.items() if group.differences]
    if len(with_any) == 1 and len(found.groups) > 1 and not found.missing:
        yield f"All differences are in {_called(with_any[0])}."
    for group in found.groups.values():
        tensors = [d for d in group.differences if d.name in group.digests]
        files = {d.elements.files if d.elements is not None else () for d in tensors}
        if len(files) == 1 and (named := next(iter(files))):
            yield f"All tensors that differ do so in {_few(named)} alone."
        if found.replicas and group.differences:
            yield _who(group)


def _who(group: Compared) -> str:
    number = len(group.labels)
    if group.suspects:
        return (
            f"Suspect: {_few(group.suspects)}; the other {number - len(group.suspects)} of "
            f"{number} replicas agree."
        )
    if number == 2:
        return f"Of two replicas, {' and '.join(group.labels)}, nothing tells which one is wrong."
    return f"There is no majority of the {number} replicas that agrees: none is named as wrong."


def _group(member: str, group: Compared, replicas: bool, left: int) -> Iterator[str]:
    indent = "  "
    if member:
        number = _count(len(group.differences), "difference")
        yield f"{indent}{_called(member) if not replicas else _few(group.labels)}: {number}"
        indent = "    "
    yield from (f"{indent}{text}" for text in list(_steps(group))[:_MOST_LINES])
    yield from _renamed(group.renamed, indent)
    for difference in group.differences[:left]:
        yield from (f"{indent}{text}" for text in _difference(difference, group.labels))
    if len(group.differences) > left:
        yield f"{indent}and {len(group.differences) - left} more: --json has all of them"
    for name, why in list(group.unread.items())[:_MOST_LINES]:
        yield f"{indent}{name} was not compared: {why}"


def _steps(group: Compared) -> Iterator[str]:
    """What the checkpoints say of their step: once where they agree."""
    for key in dict.fromkeys(key for own in group.steps for key in own):
        every = [own.get(key) for own in group.steps]
        if len(set(every)) == 1:
            yield f"{key}: {_span(every[0])}"
            continue
        said: dict[str, list[str]] = {}
        for label, own in zip(group.labels, every, strict=True):
            said.setdefault(_span(own), []).append(label)
        each = "; ".join(f"{span} in {_few(labels)}" for span, labels in said.items())
        # A checkpoint that does not say may be of any.
        stated = {span for span in every if span is not None}
        verdict = " - they are of different steps" if len(stated) > 1 else ""
        yield f"{key}: {each}{verdict}"


def _span(steps: tuple[int, int] | None) -> str:
    if steps is None:
        return "not said"
    least, greatest = steps
    return str(least) if least == greatest else f"{least} to {greatest}"


def _difference(found: Difference, labels: Sequence[str]) -> Iterator[str]:
    here, there = labels[found.reference], labels[found.checkpoint]
    if found.kind == MISSING:
        yield f"{found.name}: missing in {there}; {found.there[0]} in {here}"
    elif found.kind == EXTRA:
        yield f"{found.name}: {found.there[1]} in {there}, not there in {here}"
    elif found.kind in (SHAPE, DTYPE, TYPE):
        note = f"; {found.note}" if found.note else ""
        yield (
            f"{found.name}: another {found.kind}, {found.there[0]} in {here} and "
            f"{found.there[1]} in {there}{note}"
        )
    elif found.kind == ELEMENTS and found.elements is not None:
        yield f"{found.name} ({found.there[0]})"
        yield f"    {_elements(found.elements, here, there)}"
    else:
        note = f"; {found.note}" if found.note else ""
        yield f"{found.name}: {found.there[0]} in {here}, {found.there[1]} in {there}{note}"


def _elements(found: ElementDifference, here: str, there: str) -> str:
    said = [
        f"{found.elements} of {_count(found.total, 'element')} differ"
        if found.total > 1
        else "differs"
    ]
    at = f" at {list(found.first)}" if found.first else ""
    first, second = map(_shown, found.at_first)
    said.append(f"first{at}: {first} in {here}, {second} in {there}")
    if found.flipped is not None:
        part = f" ({found.flipped.part})" if found.flipped.part else ""
        said.append(f"one flipped bit: bit {found.flipped.bit}{part}")
    if found.nonfinite:
        said.append(f"{found.nonfinite} of them NaN or infinite")
    if found.largest:
        relative = f", relative {found.relative:.2g}" if math.isfinite(found.relative) else ""
        said.append(f"largest difference {found.largest:.3g}{relative}")
    elif not found.nonfinite:
        said.append("in bits alone (0.0 and -0.0, say): the values are equal")
    if found.files:
        said.append(f"in {_few(found.files)}")
    return "; ".join(said)


def _shown(value: complex | float | int | bool) -> str:
    """A value with as many digits as distinguish numbers of 32 bits."""
    return f"{value:.9g}" if isinstance(value, float) else repr(value)


def _called(member: str) -> str:
    """A member, for a reader."""
    return f"the shards that {METADATA} names" if member == WHOLE else member


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_FILES])
    return shown if len(names) <= _MOST_FILES else f"{shown} and {len(names) - _MOST_FILES} more"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _size(octets: int) -> str:
    size, unit = float(octets), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"


def as_json(found: Verification) -> dict[str, Any]:
    """The verification as JSON; numbers that are not finite are texts, as in the REST interface."""
    return {
        "state": found.state,
        "same": found.state == SAME,
        "checkpoints": list(found.paths),
        "replicas": found.replicas,
        "groups": [_group_json(member, group) for member, group in found.groups.items()],
        "missing": [{"member": m, "checkpoint": path} for m, path in found.missing.items()],
        "not_compared": [{"member": m, "why": why} for m, why in found.unread.items()],
        "passed_over": found.passed_over,
    }


def _group_json(member: str, group: Compared) -> dict[str, Any]:
    return {
        "member": member,
        "checkpoints": [
            {
                "label": label,
                "format": how,
                "steps": {key: list(span) for key, span in steps.items()},
                "differing": differing,
            }
            for label, how, steps, differing in zip(
                group.labels, group.formats, group.steps, group.differing, strict=True
            )
        ],
        "suspects": group.suspects,
        "tensors": len(group.digests),
        "values": group.values,
        "bytes": group.octets,
        "renamed": group.renamed,
        "differences": [_difference_json(d, group.labels) for d in group.differences],
        "not_compared": [{"name": n, "why": why} for n, why in group.unread.items()],
        "digests": {
            name: [None if one is None else f"{one:016x}" for one in every]
            for name, every in group.digests.items()
        },
    }


def _difference_json(found: Difference, labels: Sequence[str]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": found.name,
        "kind": found.kind,
        "reference": {"label": labels[found.reference], "there": found.there[0]},
        "checkpoint": {"label": labels[found.checkpoint], "there": found.there[1]},
        "note": found.note,
    }
    if (of := found.elements) is not None:
        made["elements"] = {
            "differing": of.elements,
            "total": of.total,
            "first": list(of.first),
            "at_first": [_number(value) for value in of.at_first],
            "largest": _number(of.largest),
            "relative": _number(of.relative),
            "nonfinite": of.nonfinite,
            "flipped_bit": None
            if of.flipped is None
            else {"bit": of.flipped.bit, "part": of.flipped.part},
            "files": list(of.files),
        }
    return made


def _number(value: complex | float | int | bool) -> Any:
    if isinstance(value, complex):
        return [_number(value.real), _number(value.imag)]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
