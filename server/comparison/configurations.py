"""What two runs said of themselves, key by key, and which of the differences matter most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Prefixes of flattened keys, in the order in which a person looks for what two runs do differently:
# what was chosen for the training, then the model, then how and where it ran.
_RELEVANCE = (
    "seed",
    "world_size",
    "parameter_groups",
    "lr",
    "batch",
    "optimizer",
    "scheduler",
    "profile",
    "loss",
    "model",
    "parameters",
    "trainable",
    "frozen",
    "modules",
    "module_settings",
    "tied",
    "dtypes",
    "precision",
    "data",
    "sharded_over",
    "determinism",
    "script",
    "git_commit",
    "torch",
    "numpy",
    "cuda",
    "device",
    "python",
    "threads",
)

MISSING = None


# What an agent says of where, by which code and with what a training runs, or of the model that is
# compared anyway: all else was chosen for the training, by the user's own names too.
_CIRCUMSTANCES = frozenset(
    {
        *("git_commit", "torch", "python", "numpy", "cuda", "device", "device_name", "threads"),
        *("memory_limits", "determinism", "environments", "optimizer_steps", "optimizer_tensors"),
        *("parameters", "parameters_digest", "parameter_tensors", "buffers_digest"),
        *("buffer_tensors", "training_mode", "sharded_over", "first_run", "host", "tags"),
    }
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A key whose values differ; a value is None where the run has no such key."""

    key: str
    values: tuple[Any, ...]


def of_run(world_size: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a run was set to: the number of its ranks, too, and not what it is filed under."""
    return {"world_size": world_size} | {k: v for k, v in config.items() if k != "tags"}


def flattened(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, `a.b.0.c`; empty lists and mappings are leaves."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{key}.")
        elif isinstance(value, list) and any(isinstance(one, Mapping | list) for one in value):
            yield from flattened({str(n): one for n, one in enumerate(value)}, f"{key}.")
        else:
            yield key, value


def differences(configs: Sequence[Mapping[str, Any]]) -> tuple[list[Setting], int]:
    """Keys whose values are not the same in all runs, the most relevant first; how many are."""
    flat = [dict(flattened(config)) for config in configs]
    keys = {key for one in flat for key in one}
    settings = [Setting(key, tuple(one.get(key, MISSING) for one in flat)) for key in keys]
    differing = [s for s in settings if any(_text(v) != _text(s.values[0]) for v in s.values)]
    ordered = sorted(differing, key=lambda s: (_place(s.key), s.key))
    return ordered, len(keys) - len(differing)


def seeds(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration calls a seed, by key."""
    return {k: v for k, v in flattened(config) if "seed" in k.rpartition(".")[2].lower()}


def is_chosen(key: str) -> bool:
    """Whether a flattened key says how a training is meant, and not where it runs or by chance."""
    last = key.rpartition(".")[2].lower()
    return key.partition(".")[0] not in _CIRCUMSTANCES and "seed" not in last


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same setting."""
    return _text(one) == _text(other)


def _text(value: Any) -> str:
    # 1 and 1.0 are the same setting, True and 1 are not.
    plain = float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    return repr(plain)


def _place(key: str) -> int:
    last = key.rpartition(".")[2]
    if "seed" in last.lower():
        return 0
    places = [n for n, name in enumerate(_RELEVANCE) if key.startswith(name)]
    return places[0] if places else len(_RELEVANCE)
