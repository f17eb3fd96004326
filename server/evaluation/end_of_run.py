"""When a run is over that nobody has ended: all of its ranks have fallen silent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankscope.server.detectors.rank.silent import SilentPolicy
from rankscope.server.storage.judgement.evaluation import RunRow
from rankscope.server.window import Check, LivenessPart, Status

# A run all of whose ranks are silent by these is not running.
_SILENT = SilentPolicy()
# Its alert comes within a second of that, and at the latest after this many times as long where the
# server is too busy to listen.
_ALERT_WITHIN = 4.0


def state_of(
    row: RunRow, liveness: Sequence[LivenessPart], now: float, checks: Mapping[str, Check]
) -> str | None:
    """The state of a run whose ranks have all ended or fallen silent; None while one is alive.

    Nobody looks at a run that has ended: it does not end before there is an alert of the silence,
    as long as that may still come.
    """
    if row.state != "running" or not liveness:
        return None
    silent, failed = 0, any(entry.liveness.state == "failed" for entry in liveness)
    for life in (entry.liveness for entry in liveness):
        if life.state == "running":
            patience = _SILENT.patience(life)
            if not (failed or _is_reported(checks)):
                patience *= _ALERT_WITHIN
            if now - life.last_seen < patience:
                return None
            silent += 1
    if not silent:
        return None  # the last rank's own report has decided
    return "failed" if failed else "lost"


def _is_reported(checks: Mapping[str, Check]) -> bool:
    """Whether `rank.silent` has said what it will say of ranks that are not heard of."""
    check = checks.get("rank.silent")
    return check is None or check.status not in (Status.OK, Status.INSUFFICIENT_DATA)
