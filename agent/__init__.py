"""Watches one rank of a training job from inside the trainer.

    from rankscope import agent
    monitor = agent.attach(model, optimizer)

Names are loaded on first use: the server imports `rankscope.agent.wire`, and must not pay for (or
even have) torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankscope.agent.attach import attach as attach
    from rankscope.agent.monitor import Monitor as Monitor

_HOMES = {
    "attach": "rankscope.agent.attach",
    "Monitor": "rankscope.agent.monitor",
}

__all__ = ["Monitor", "__version__", "attach"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("rankscope")
    if name in _HOMES:
        # `import_module` binds the submodule `attach` in this package; the function must win, so
        # it is bound again here, and this hook is not called for it a second time.
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
