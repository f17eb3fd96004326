"""Digests that `monitor.checkpoint` has kept beside a checkpoint, read as one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from rankscope.agent.checkpoint_digests import FILE, SUFFIX, NoRecord, read
from rankscope.agent.checkpoints.errors import Unreadable
from rankscope.agent.checkpoints.source import Source, StoredTensor


def is_digests(path: Path) -> bool:
    """Whether a file is one of those beside a checkpoint: `step500.pt.digests/rank_0.json`."""
    return path.parent.name.endswith(SUFFIX) and FILE.fullmatch(path.name) is not None


def open_digests(path: Path) -> Source:
    """What one rank has recorded.

    Raises:
        Unreadable: it is none of these files, or damaged.
    """
    try:
        record = read(path)
    except NoRecord as error:
        raise Unreadable(str(error)) from error
    source = Source("digests of what was saved", digests_alone=True)
    source.unread |= record.unread
    for name, one in record.tensors.items():
        if not isinstance(getattr(torch, one.dtype, None), torch.dtype):
            source.unread[name] = f"its type, {one.dtype}, is not known to this torch"
        elif one.layout:
            source.unread[name] = "a shard: what a rank has loaded is compared with it, no file"
        else:
            read_it = partial(_no_elements, path, name)
            digest = int(one.digest, 16)
            source.tensors[name] = StoredTensor(one.shape, one.dtype, (), read_it, digest)
    return source


def _no_elements(path: Path, name: str) -> torch.Tensor:
    raise Unreadable(f"{path}: of {name} the digest alone is kept")
