"""What is answered while there is not enough to judge, and how long it is waited for."""

from __future__ import annotations

from rankscope.server.detectors.mechanisms.wording import count
from rankscope.server.window import Check

# Observations after which it is not going to come: loggers of losses and norms begin with the first
# steps, and full samples are taken at each of them in the beginning.
GRACE = 20


def in_time(check: Check, observed: int) -> Check:
    """An answer as it holds after so many observations of a run."""
    if not check.early:
        return check
    return Check.insufficient(check.early) if observed < GRACE else Check(check.status, check.why)


def too_few(have: int, thing: str, need: int) -> Check:
    """So many of so many: `12 loss values of 40 needed`."""
    return Check.insufficient(f"{count(have, thing)} of {need} needed.")
