"""`trainer_state.json` of Hugging Face's Trainer as a log."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope.server.exchange.logs import Collected, Log, ranks_of
from rankscope.server.exchange.points import ExchangeError

NAME = "trainer_state.json"
_EVALUATIONS = ("eval", "test")
# Sums of the whole training, logged once with the last step.
_TOTALS = frozenset("train_loss train_runtime total_flos".split())


def read(source: Path) -> Log:
    """The run in a `trainer_state.json`, or in a folder with one or with checkpoints that have one.

    Tags are called as Trainer calls them in other tools: `train/loss`, `eval/loss`.

    Raises:
        ExchangeError: there is none, or it is no such file.
    """
    path = find(source)
    if path is None:
        raise ExchangeError(f"{source} holds no {NAME}, nor does a checkpoint in it")
    try:
        state = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ExchangeError(f"{path} is not JSON: {error}") from error
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise ExchangeError(f"{path} has no list log_history, as a {NAME} has")
    collected = Collected()
    for number, entry in enumerate(history):
        step = entry.get("step") if isinstance(entry, dict) else None
        if not isinstance(step, int):
            raise ExchangeError(f"{path}: log_history[{number}] has no step")
        _take(collected, step, entry)
    place = str(path.resolve())
    ranks, notes = ranks_of(place, {0: collected})
    _, losses = collected.points.get("train/loss", ([], []))
    if all(map(math.isfinite, losses)):
        notes.append(
            "Trainer replaces losses that are NaN or infinite by the mean of those before, unless "
            "logging_nan_inf_filter is off: there may have been some that cannot be seen here."
        )
    return Log(place, "Transformers", ranks, tuple(notes))


def find(source: Path) -> Path | None:
    """The file that is meant: of several checkpoints the last one's."""
    if source.is_file():
        return source
    if (own := source / NAME).is_file():
        return own
    checkpoints = {}
    for path in source.glob(f"checkpoint-*/{NAME}"):
        number = path.parent.name.rpartition("-")[2]
        if number.isdecimal():
            checkpoints[int(number)] = path
    return checkpoints[max(checkpoints)] if checkpoints else None


def _take(collected: Collected, step: int, entry: Mapping[str, Any]) -> None:
    for name, value in entry.items():
        if name in ("step", *_TOTALS) or isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            phase, _, rest = name.partition("_")
            tag = f"{phase}/{rest}" if phase in _EVALUATIONS and rest else f"train/{name}"
            collected.add(tag, step, _number(value))


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # JSON has integers of any length
        return math.inf if value > 0 else -math.inf
