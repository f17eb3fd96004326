"""Which tool has written a file or folder."""

from __future__ import annotations

from pathlib import Path

from rankscope.server.exchange import (
    csv_logs,
    mlflow_logs,
    tensorboard_logs,
    transformers_logs,
    wandb_logs,
)
from rankscope.server.exchange.logs import Log
from rankscope.server.exchange.points import ExchangeError

TOOLS = ("tensorboard", "wandb", "mlflow", "transformers", "csv")
_KNOWN = (
    "TensorBoard event files, trainer_state.json (Transformers), metrics.csv (Lightning), "
    "run-ID.wandb (Weights & Biases), a store of MLflow"
)


def read(source: str, chosen: str | None = None) -> Log:
    """The run in a file or folder, or on a tracking server, of any tool that is known.

    Of several logs of one training the one that rounds least is read: JSON and CSV before events.

    Args:
        source: path or URL.
        chosen: id or name of the run, where a store holds several.

    Raises:
        ExchangeError: nothing is recognised, or what is there cannot be read.
    """
    tool = tool_of(source)
    if tool is None:
        raise ExchangeError(f"{source} is none of what is read here: {_KNOWN}")
    return read_as(tool, source, chosen)


def read_as(tool: str, source: str, chosen: str | None = None) -> Log:
    """As `read`, where it is known which of `TOOLS` has written it.

    Raises:
        ExchangeError: it holds nothing of that tool, or what is there cannot be read.
    """
    if tool == "mlflow":
        return mlflow_logs.read(source, chosen)
    if chosen is not None:
        raise ExchangeError("--select is for stores of MLflow; name the folder of the run")
    path = _existing(source)
    if tool == "tensorboard":
        return tensorboard_logs.read(path)
    if tool == "wandb":
        return wandb_logs.read(path)
    return transformers_logs.read(path) if tool == "transformers" else csv_logs.read(path)


def tool_of(source: str) -> str | None:
    """Which of `TOOLS` has written it; None where nothing is recognised.

    Raises:
        ExchangeError: nothing is there.
    """
    if source.startswith(mlflow_logs.SERVERS):
        return "mlflow"
    path = _existing(source)
    if path.is_file():
        by_suffix = {".json": "transformers", ".csv": "csv", wandb_logs.SUFFIX: "wandb"}
        if path.suffix in by_suffix:
            return by_suffix[path.suffix]
        if "tfevents" in path.name:
            return "tensorboard"
    elif transformers_logs.find(path) is not None:
        return "transformers"
    elif csv_logs.find(path) is not None:
        return "csv"
    elif tensorboard_logs.has_events(path):
        return "tensorboard"
    elif wandb_logs.find(path) is not None:
        return "wandb"
    return "mlflow" if mlflow_logs.store(source) is not None else None


def _existing(source: str) -> Path:
    path = Path(source)
    if not path.exists():
        raise ExchangeError(f"there is no {source}")
    return path
