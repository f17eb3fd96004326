"""How far a run can be judged: which ranks are waited for, and how long. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope.server.window import LivenessPart, RankLiveness

# How long a rank may hold up the others: one that has never been seen, and one that fell silent
# while others were heard of. When nobody is heard of, it is rather the network that is down than
# all ranks, and they are waited for longer.
UNSEEN_SECONDS = 30.0
SILENT_SECONDS = 10.0
QUIET_SECONDS = 60.0
MAX_LAG = 4096


def judged_until(
    liveness: Mapping[int, LivenessPart],
    reached: Mapping[int, int],
    *,
    world_size: int,
    more: bool,
    now: float,
) -> int:
    """Last step that nothing more is to be expected about; -1 for none.

    Args:
        liveness: of the ranks that were seen.
        reached: last step about which each of them has said all it will say.
        more: whether there is more in the database than was read.
    """
    if not reached:
        return -1
    fastest = max(reached.values())
    near = [rank for rank, step in reached.items() if step > fastest - MAX_LAG]
    if more:
        # There is more in the database: nobody is late, all are to be read first.
        return min(reached[rank] for rank in near)
    first_seen = min(life.liveness.first_seen for life in liveness.values())
    waited = max(now, first_seen) - first_seen
    if len(liveness) < world_size and waited < UNSEEN_SECONDS:
        return -1
    lives = [life.liveness for life in liveness.values()]
    # One that has ended has shown that the server can be reached.
    ended = any(life.state != "running" for life in lives)
    heard = now if ended else max(life.last_seen for life in lives)
    holding = [reached[rank] for rank in near if _is_awaited(liveness[rank].liveness, heard, now)]
    return min([*holding, fastest])


def reported_until(entry: LivenessPart, newest: int, now: float) -> int:
    """Last step about which a rank has said all it will say, `newest` being the last one known."""
    if entry.liveness.state != "running":
        return max(entry.through_step, newest)
    if entry.through_step < 0 and now - entry.liveness.first_seen >= SILENT_SECONDS:
        # A client that does not say which steps are complete: those before its newest.
        return newest - 1
    return entry.through_step


def _is_awaited(life: RankLiveness, heard: float, now: float) -> bool:
    patience = max(SILENT_SECONDS, 2 * life.heartbeat_seconds)
    return (
        life.state == "running"
        and heard - life.last_seen < patience
        and now - life.last_seen < max(QUIET_SECONDS, patience)
    )
