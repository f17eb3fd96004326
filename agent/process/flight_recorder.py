"""The last collectives of this process, as PyTorch's flight recorder has them.

To read it is no collective and waits for no device: of NCCL it asks events whether they have
passed.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rankscope.agent.wire import limits

# That of gloo and other backends, and that of NCCL, which is a recorder of its own.
_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")


def last_collectives() -> list[dict[str, Any]]:
    """The last collectives of each process group, in the order in which they were begun.

    Returns:
        At most `COLLECTIVES` (`wire/limits.py`) with `group`, `name` (`gloo:all_reduce`),
        `sequence` (its number within the group), `state` (`scheduled`, `started`, `completed`) and
        `shapes` of its inputs. Empty without process groups, and where nothing is recorded
        (`TORCH_FR_BUFFER_SIZE=0`, or a version that does not record).
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    recorder = sys.modules.get("torch._C._distributed_c10d")
    entries: list[Mapping[str, Any]] = []
    for name in _DUMPS:
        if (dump := getattr(recorder, name, None)) is None:
            continue
        # With collectives, without stack traces, also those that are over. Made by this process.
        entries += pickle.loads(dump(True, False, False)).get("entries", ())
    return shortened(sorted(entries, key=lambda entry: entry.get("time_created_ns", 0)))


def shortened(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is posted of a recorder's entries.

    What is not over is kept first, the one that was begun first above all: the others may wait for
    it; then the last of each group, then the most recent ones.
    """
    # Of messages between two ranks the numbers are not those of the group.
    known = [entry for entry in entries if not entry.get("is_p2p")]
    last = {_group(entry): place for place, entry in enumerate(known)}
    unfinished = [n for n, entry in enumerate(known) if _state(entry) != "completed"]
    order = dict.fromkeys(
        [*unfinished[:1], *last.values(), *unfinished, *reversed(range(len(known)))]
    )
    kept = sorted(list(order)[: limits.COLLECTIVES])
    return [_described(known[place]) for place in kept]


def _described(entry: Mapping[str, Any]) -> dict[str, Any]:
    shapes = entry.get("input_sizes", ())[: limits.COLLECTIVE_SHAPES]
    return {
        "group": _group(entry),
        "name": str(entry.get("profiling_name", ""))[: limits.STACK_CHARACTERS],
        "sequence": int(entry.get("collective_seq_id", 0)),
        "state": _state(entry),
        "shapes": [[int(n) for n in shape[: limits.COLLECTIVE_SHAPES]] for shape in shapes],
    }


def _group(entry: Mapping[str, Any]) -> str:
    # Number and description: two groups may have the same one.
    named = entry.get("process_group", ())
    return " ".join(str(part) for part in named)[: limits.STACK_CHARACTERS]


def _state(entry: Mapping[str, Any]) -> str:
    # Gloo's work stays as it was scheduled; that it is over shows in `retired`.
    return "completed" if entry.get("retired") else str(entry.get("state", ""))[:32]
