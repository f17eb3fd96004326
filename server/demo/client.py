"""What the demo asks the server, over the same REST interface that everybody uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankscope.server.rest_client import NoAnswer, RestClient

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
        self._client = RestClient(url)

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
            answer = self._client.ask(f"/api/v1{path}", list((query or {}).items()), timeout=10.0)
        except NoAnswer as error:
            raise ServerAway(f"{self.url} does not answer: {error}") from error
        if answer.status == 404:
            return None
        if answer.status != 200 or answer.body is None:
            raise ServerAway(f"{self.url}{path} answers {answer.status}: {answer.body}")
        return answer.body
