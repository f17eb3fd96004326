"""Follows a demo run through the server's REST interface, and prints what is new."""

from __future__ import annotations

import time

from rankscope.server.demo.client import Client, Json
from rankscope.server.demo.faults import Injection
from rankscope.server.demo.processes import Job, Process
from rankscope.server.demo.screen import Screen

_POLL_SECONDS = 0.3
# Ranks post once or twice a second: the latest step of one may lie so far behind that of another.
_BEHIND_STEPS = 200
# Without a new step for so long, the training hangs.
_STUCK_SECONDS = 180.0
# After the training: how long the server may take to see that it has ended, or that a rank is gone.
_SETTLE_SECONDS = 90.0


class DemoFailed(Exception):
    """The demo itself did not work; the message says which part and shows what it printed."""


class Watch:
    """Asks the server how far the run is, and prints what is new."""

    def __init__(self, client: Client, run: str, screen: Screen) -> None:
        self.client = client
        self.run = run
        self.screen = screen
        self.last_step = -1
        self._printed: dict[str, str] = {}
        self._followed: set[str] = set()

    def progress(self, steps: int) -> None:
        """Shows the latest step and losses."""
        facts = self.client.run(self.run)
        if facts is None or facts["last_step"] is None or facts["last_step"] < 0:
            return
        self.last_step = int(facts["last_step"])
        losses = self.client.losses(self.run, from_step=max(self.last_step - _BEHIND_STEPS, 0))
        self.screen.progress(step=self.last_step, steps=steps, losses=losses)

    def alerts(self) -> list[Json]:
        """Prints the alerts that are new; returns all of them."""
        alerts = self.client.alerts(self.run)
        for alert in alerts:
            if alert["id"] not in self._printed:
                self._printed[alert["id"]] = alert["kind"]
                self.screen.alert(alert, f"{self.client.url}/runs/{self.run}#alert-{alert['id']}")
            # A cause may be understood later than what follows from it.
            for consequence in alert["consequences"]:
                if consequence in self._printed and consequence not in self._followed:
                    self._followed.add(consequence)
                    kind = self._printed[consequence]
                    self.screen.say(f"       {kind} (above) follows from {alert['kind']}")
        return alerts

    def follow(self, job: Job, server: Process, *, steps: int) -> None:
        """Follows the training to its end."""
        last_step, since = -1, time.monotonic()
        while job.running:
            if server.exit_code is not None:
                raise DemoFailed(f"the server ended:\n{server.tail()}")
            self.progress(steps)
            self.alerts()
            if self.last_step != last_step:
                last_step, since = self.last_step, time.monotonic()
            elif time.monotonic() - since > _STUCK_SECONDS:
                raise DemoFailed(f"no step for {_STUCK_SECONDS:.0f} s:\n{job.ranks[0].tail()}")
            time.sleep(_POLL_SECONDS)
        self.progress(steps)

    def settle(self, job: Job, server: Process, injection: Injection) -> list[Json]:
        """The alerts of the run, once the server has judged all of it.

        An alert may still come after the last step: a dead rank is distinguished from a slow one by
        waiting.

        Raises:
            DemoFailed: the server has not judged the run in time; "not checked" is no success.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        judged = False
        while time.monotonic() < deadline:
            facts = self.client.run(self.run)
            judged = (
                facts is not None
                and facts["state"] != "running"
                and facts["evaluated_step"] >= facts["last_step"]
            )
            alerts = self.alerts()
            if judged and (alerts or not injection.fault.kinds):
                return alerts
            time.sleep(_POLL_SECONDS)
        if not judged:
            raise DemoFailed(
                f"the server has not judged the run within {_SETTLE_SECONDS:.0f} s\n"
                f"--- server\n{server.tail()}\n--- rank 0\n{job.ranks[0].tail()}"
            )
        return self.alerts()


def check_exit_codes(job: Job, injection: Injection) -> None:
    """Without a fault that ends the job, every rank has to come to its own end.

    Raises:
        DemoFailed: one did not.
    """
    for rank, (process, code) in enumerate(zip(job.ranks, job.exit_codes, strict=True)):
        if code != 0 and not injection.fault.ends_the_job:
            raise DemoFailed(f"rank {rank} ended with exit code {code}:\n{process.tail()}")
