"""Recordings of the corpus: made once, found again, and anew where the code that made them changed.

What has to be found in a run, and by when, is no part of its recording.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rankscope.server.detectors import DETECTORS
from rankscope.server.detectors.settings import Effective, Overrides, effective
from tests.lab.corpus import basics, training, watched
from tests.lab.corpus.batches import fed
from tests.lab.corpus.families import FAULTY, HEALTHY, MODULES, PROFILES
from tests.support.runs.traces import Trace

_KEY = "recorded_by"


def settings_of(name: str) -> Effective:
    """What a family's runs are judged by: as detectors declare, under the profile of its loss."""
    return effective([Overrides("the corpus", PROFILES.get(name))], DETECTORS)


def facts_of(name: str, seed: int) -> Mapping[str, Any]:
    """What was done to a training, and what has to be found of it."""
    _, facts = (HEALTHY | FAULTY)[name](seed)
    return facts


def path_of(folder: Path, name: str, seed: int) -> Path:
    """Where a recording lies."""
    return folder / f"{name}.{seed}.npz"


def load(folder: Path, name: str, seed: int) -> Trace:
    """A recorded run, with the batches that it was made of."""
    recipe, _ = (HEALTHY | FAULTY)[name](seed)
    return fed(Trace.load(path_of(folder, name, seed)), recipe)


def record(folder: Path, name: str, seed: int) -> bool:
    """Trains a family's member, unless the same code has recorded it before.

    Returns:
        Whether it was trained.
    """
    path, key = path_of(folder, name, seed), _key(MODULES[name])
    if path.exists() and Trace.load(path).facts.get(_KEY) == key:
        return False
    torch.manual_seed(seed)
    recipe, _ = (HEALTHY | FAULTY)[name](seed)
    trace = watched.watched(name, seed, recipe, {_KEY: key})
    # A run that was broken off must not leave half a recording.
    part = path.with_suffix(".part.npz")
    trace.save(part)
    part.replace(path)
    return True


def renewed(trace: Trace, name: str, kept: Trace) -> Trace:
    """A recording with as much of it as one that the tests replay has."""
    return replace(
        trace,
        facts=dict(facts_of(name, trace.seed)),
        series={metric: trace.series[metric] for metric in kept.series},
        present={metric: mask for metric, mask in trace.present.items() if metric in kept.series},
        layers=trace.layers if kept.layers else (),
        reductions=trace.reductions if kept.reductions else (),
    )


@cache
def _key(module: ModuleType) -> str:
    """Of the code that trains and records: comments and layout aside."""
    return _digest((training, watched, basics, module)) + f" torch {torch.__version__}"


def _digest(modules: Sequence[ModuleType]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for module in modules:
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        digest.update(ast.dump(ast.parse(source)).encode())
    return digest.hexdigest()
