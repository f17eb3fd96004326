"""`rankscope verify`: whether two checkpoints are the same, and where not."""

from __future__ import annotations

import argparse
import io
import json
import logging
import sys
from collections.abc import Sequence

from rankscope.agent.checkpoints.errors import DAMAGED, Unreadable, told
from rankscope.agent.checkpoints.text import as_json, lines
from rankscope.agent.checkpoints.verification import (
    DIFFERENT,
    SAME,
    UNCHECKED,
    verify_pair,
    verify_replicas,
)

_EXIT_CODES = {SAME: 0, DIFFERENT: 1, UNCHECKED: 2}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code.

    0: the same; 1: they differ; 2: wrong usage, something could not be read and the rest is the
    same, or the command itself has failed.
    """
    parser = argparse.ArgumentParser(
        prog="rankscope verify",
        description="Compares two checkpoints tensor by tensor, by the digests that the agent "
        "sends of a run's tensors, and says what differs, by how much, and which step each is of. "
        "A checkpoint is a file of torch.save or safetensors, a folder of "
        "torch.distributed.checkpoint, or a folder of such files (one a rank, say), which are "
        "compared by name. No code of a checkpoint is run. Exit code 0: the same; 1: they differ; "
        "2: wrong usage, or something cannot be read.",
    )
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="file or folder")
    parser.add_argument(
        "--replicas",
        action="store_true",
        help="compare with each other the files of all ranks in one folder, or the files given: "
        "which rank differs from the others",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out names (optimizer.*) and files (rng_state_*) that match; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    given = parser.parse_args(arguments)
    if not given.replicas and len(given.checkpoints) != 2:
        parser.error(
            f"two checkpoints are compared, and there {_number(len(given.checkpoints))}; to "
            "compare the ranks of one checkpoint with each other say --replicas"
        )
    # Torch warns that a distributed tensor has come without its process group: it needs none here.
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names of a checkpoint, and of files, may hold what the terminal's encoding does not.
            stream.reconfigure(errors="backslashreplace")
    try:
        return _answer(given)
    except (Unreadable, *DAMAGED) as error:
        # Python's own exit code of an exception, 1, would say that they differ.
        sys.stderr.write(f"rankscope verify: {told(error)}\n")
        return 2


def _answer(given: argparse.Namespace) -> int:
    if given.replicas:
        found = verify_replicas(given.checkpoints, given.ignore)
    else:
        first, second = given.checkpoints
        found = verify_pair(first, second, given.ignore)
    if given.json:
        sys.stdout.write(f"{json.dumps(as_json(found), indent=2)}\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in lines(found)))
    return _EXIT_CODES[found.state]


def _number(count: int) -> str:
    return "is one" if count == 1 else f"are {count}"
