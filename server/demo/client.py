"""What the demo asks the server, over the same REST interface that everybody uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankscope.client.errors import ClientError, NotFound
from rankscope.client.http import Http

Json = dict[str, Any]


class ServerAway(Exception):
    """The server cannot be reached, or answers with an error."""


class Client:
    """Reads runs, series and alerts of one server.

    Args:
        url: of the server, without a slash at its end.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = Http(url, timeout=10.0)

    def run(self, run: str) -> Json | None:
        """The run, None while the server has not heard of it."""
        return self._get(f"/runs/{run}")

    def losses(self, run: str, *, from_step: int) -> dict[int, float]:
        """Latest loss of each rank among the steps from `from_step` on."""
        answer = self._get(f"/runs/{run}/series", {"metric": "loss", "from_step": str(from_step)})
        series = answer["series"] if answer else []
        return {s["rank"]: float(s["values"][-1]) for s in series if s["values"]}

    def alerts(self, run: str) -> list[Json]:
        """Root alerts of the run with all they hold, in the order in which they opened."""
        answer = self._get(f"/runs/{run}/alerts", {"limit": "100"})
        items = answer["items"] if answer else []
        return sorted(items, key=lambda alert: str(alert["opened_at"]))

    def _get(self, path: str, query: Mapping[str, str] | None = None) -> Json | None:
        try:
            return self._http.json("GET", f"/api/v1{path}", list((query or {}).items()))
        except NotFound:
            return None
        except ClientError as error:
            raise ServerAway(f"{self.url}{path} does not answer: {error}") from error
