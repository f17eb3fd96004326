"""Asks a Rankscope server, from a script, a notebook or a scheduler: its whole REST interface.

    from rankscope.client import Client

    with Client("http://127.0.0.1:8642") as client:
        for run in client.runs(project="vision", state="failed"):
            print(run.id, [alert.title for alert in client.run_alerts(run.id)])

It needs nothing that `pip install rankscope` does not bring. Names are loaded on first use: the
commands use `rankscope.client.http` alone, and have to start fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankscope.client.errors import ClientError as ClientError
    from rankscope.client.errors import NotAllowed as NotAllowed
    from rankscope.client.errors import NotFound as NotFound
    from rankscope.client.errors import NotRankscope as NotRankscope
    from rankscope.client.errors import Problem as Problem
    from rankscope.client.errors import TryLater as TryLater
    from rankscope.client.errors import Unreachable as Unreachable
    from rankscope.client.rest import Client as Client
    from rankscope.client.rest import RunEvent as RunEvent

__all__ = [
    "Client",
    "ClientError",
    "NotAllowed",
    "NotFound",
    "NotRankscope",
    "Problem",
    "RunEvent",
    "TryLater",
    "Unreachable",
]

_OF_REST = ("Client", "RunEvent")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "rest" if name in _OF_REST else "errors"
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
