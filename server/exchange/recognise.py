"""Which tool has written a file or folder."""

from __future__ import annotations

from pathlib import Path

from rankscope.server.exchange import csv_logs, tensorboard_logs, transformers_logs
from rankscope.server.exchange.logs import Log
from rankscope.server.exchange.points import ExchangeError

_KNOWN = "TensorBoard event files, trainer_state.json (Transformers), metrics.csv (Lightning)"


def read(source: Path) -> Log:
    """The run in a file or folder of any tool that is known.

    Of several logs of one training the one that rounds least is read: JSON and CSV before events.

    Raises:
        ExchangeError: nothing is recognised, or what is there cannot be read.
    """
    if not source.exists():
        raise ExchangeError(f"there is no {source}")
    if source.is_file():
        if source.suffix == ".json":
            return transformers_logs.read(source)
        if source.suffix == ".csv":
            return csv_logs.read(source)
        if "tfevents" in source.name:
            return tensorboard_logs.read(source)
    elif transformers_logs.find(source) is not None:
        return transformers_logs.read(source)
    elif csv_logs.find(source) is not None:
        return csv_logs.read(source)
    elif tensorboard_logs.has_events(source):
        return tensorboard_logs.read(source)
    raise ExchangeError(f"{source} is none of what is read here: {_KNOWN}")
