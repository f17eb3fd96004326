"""What the lab asks the server: nothing that a user could not ask."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import urllib3

Json = dict[str, Any]

_POLL_SECONDS = 0.2
# An agent reports its plan after this number of steps at the earliest, if its run does not end
# before.
_FIRST_REPORTED = 32


class Server:
    """The REST interface of one server.

    Args:
        url: without a slash at its end.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._pool = urllib3.PoolManager(timeout=20.0, retries=2)

    def run(self, run: str) -> Json | None:
        """The run, None while nobody has posted anything of it."""
        return self._get(f"/runs/{quote(run, safe='')}")

    def alerts(self, run: str, *, consequences: bool = False) -> list[Json]:
        """Alerts of a run, in the order in which they opened."""
        query = {"limit": "200", "consequences": "true" if consequences else "false"}
        answer = self._get(f"/runs/{quote(run, safe='')}/alerts", query)
        items: list[Json] = answer["items"] if answer else []
        return sorted(items, key=lambda alert: (str(alert["opened_at"]), alert["first_step"]))

    def interval(self, run: str) -> int:
        """The largest number of steps between two samples that a rank takes of any link of the
        chain.

        Of all that they reported in the run, since they change it with what samples and steps cost
        them. They report it when it has changed, every 32 steps at most, and in the end; before
        that it is not known, and the steps of a short run are all there are.
        """
        facts = self.run(run)
        if facts is None:
            return 0
        last_step = max(int(facts["last_step"]), 0)
        if last_step < _FIRST_REPORTED:
            return last_step
        tiers = {tier for rank in facts["agent"]["sampling"] for tier in rank["intervals"]}
        reported = []
        for tier in tiers:
            query = {"metric": f"rankscope/interval/{tier}"}
            answer = self._get(f"/runs/{quote(run, safe='')}/series", query)
            reported += [
                int(i) for of_rank in (answer or {"series": ()})["series"] for i in of_rank["max"]
            ]
        return max(reported, default=last_step)

    def judged(self, run: str, *, timeout: float, settle: float) -> str:
        """Waits until the server has judged all of a run.

        Args:
            settle: seconds to wait for an alert that is more than information, if there is none
                by then.

        Returns:
            The state of the run; empty if it was not judged in time.
        """
        facts: Json | None = None

        def done() -> bool:
            nonlocal facts
            facts = self.run(run)
            return (
                facts is not None
                and facts["state"] != "running"
                and facts["evaluated_step"] >= facts["last_step"]
            )

        if not _waited(done, timeout) and settle == 0:
            return ""
        if settle:
            _waited(lambda: any(a["severity"] != "info" for a in self.alerts(run)), settle)
        return "" if facts is None else str(facts["state"])

    def _get(self, path: str, query: dict[str, str] | None = None) -> Json | None:
        answer = self._pool.request("GET", f"{self.url}/api/v1{path}", fields=query)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise RuntimeError(f"{self.url}{path} answers {answer.status}: {answer.data[:300]!r}")
        plain: Json = json.loads(answer.data)
        return plain


def _waited(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
