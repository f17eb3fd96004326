"""Watches one rank of a training job from inside the trainer.

    from rankscope import agent
    monitor = agent.attach(model, optimizer)

or, without a torch optimizer, `monitor = agent.start()` and `monitor.step(loss=loss, ...)`.

Names are loaded on first use: the server imports `rankscope.agent.wire`, and must not pay for (or
even have) torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankscope.agent.attach import attach as attach
    from rankscope.agent.monitor import Monitor as Monitor
    from rankscope.agent.start import start as start

_HOMES = {
    "attach": "rankscope.agent.attach",
    "start": "rankscope.agent.start",
    "Monitor": "rankscope.agent.monitor",
}

__all__ = ["Monitor", "__version__", "attach", "start"]

_ADAPTERS = "rankscope.agent.integrations"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("rankscope")
        except (PackageNotFoundError, OSError):
            # A checkout on the module path, which nobody has installed; or no file can be opened.
            return "unknown"
    if name in _HOMES:
        # `import_module` binds the submodule `attach` or `start` in this package; the function must
        # win, so it is bound again here, and this hook is not called for it a second time.
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and find_spec(f"{_ADAPTERS}.{name}"):
        return import_module(f"{_ADAPTERS}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
