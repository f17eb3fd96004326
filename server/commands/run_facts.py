"""What there is to know of one run, as the REST interface says it, and its first sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rankscope.server.commands.client import Server, run_path
from rankscope.server.detectors.mechanisms.wording import count

_GRAVITY = {"critical": 0, "warning": 1, "info": 2}
_MOST_ERRORS = 3
_PROBLEMS = {"critical": "Critical problem", "warning": "Warning"}
_ENDS = {
    "failed": "the run failed: at least one rank ended with an error or was lost",
    "lost": "the run was lost: no rank is heard of any more, and none had said that it was done",
}


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run, its verdict and its alerts, consequences too.

    Attributes:
        loss: series of the loss of each rank, in as many points as were asked for.
    """

    run: dict[str, Any]
    verdict: dict[str, Any]
    alerts: list[dict[str, Any]]
    loss: list[dict[str, Any]]

    @property
    def roots(self) -> list[dict[str, Any]]:
        """Alerts that follow from no other, the gravest open ones first."""
        return sorted(
            (a for a in self.alerts if a["parent"] is None),
            key=lambda a: (a["state"] != "open", _GRAVITY[a["severity"]], a["first_step"]),
        )

    @property
    def suspects(self) -> frozenset[int]:
        """Ranks that open alerts name."""
        return frozenset(rank for a in serious(self.roots) for rank in a["ranks"])


@dataclass(frozen=True, slots=True)
class Headline:
    """The answer in a sentence.

    Attributes:
        tone: `ok`, `warning`, `critical` or `muted`.
        word: how it stands, in a word or two.
        details: further sentences.
    """

    tone: str
    word: str
    title: str
    details: tuple[str, ...] = ()


def load(server: Server, run: str, *, points: int = 200) -> RunFacts:
    """Asks for all of it.

    Raises:
        Refused: there is no answer, or no such run.
    """
    path = run_path(run)
    about = server.get(path)
    loss = server.get(f"{path}/series", {"metric": "loss", "max_points": str(max(points, 2))})
    return RunFacts(
        run=about,
        verdict=server.get(f"{path}/verdict"),
        alerts=server.items(f"{path}/alerts", {"consequences": "true"}),
        loss=loss["series"],
    )


def serious(alerts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Open ones that are neither silenced nor mere information."""
    return [
        a for a in alerts if a["state"] == "open" and not a["silenced"] and a["severity"] != "info"
    ]


def headline(facts: RunFacts) -> Headline:
    """What the page of the run says first."""
    run, verdict, roots = facts.run, facts.verdict, facts.roots
    if found := serious(roots):
        first, more = found[0], len(found) - 1
        known = (
            f", acknowledged {said_by(first['acknowledgement'])}" if first["acknowledged"] else ""
        )
        others = f", and {count(more, 'more open alert')}" if more else ""
        problem = (
            "The run failed" if first["kind"] == "rank.failed" else _PROBLEMS[first["severity"]]
        )
        word = f"{problem}{known.rstrip()}{others}"
        return Headline(first["severity"], word, first["title"])
    hushed = [
        a for a in roots if a["silenced"] and a["severity"] == "critical" and counts(a, verdict)
    ]
    if hushed and verdict["verdict"] != "fail":
        return _silenced(hushed, verdict)
    running = run["state"] == "running"
    if verdict["verdict"] == "pass" or (running and verdict["so_far"] == "pass"):
        return _fine(facts, running)
    reasons = tuple(_sentence(reason) for reason in verdict["reasons"])
    if verdict["verdict"] == "fail":
        if run["state"] in _ENDS:
            title = _sentence(_ENDS[run["state"]])
            word = f"The run {'failed' if run['state'] == 'failed' else 'was lost'}"
            return Headline("critical", word, title, tuple(_errors(run)))
        title = _lasted(roots[0]) if roots else "The verdict is: fail"
        return Headline("warning", "Nothing open, but the run does not pass", title, reasons)
    word = "Too early to tell" if running else "Cannot tell"
    bad = "Nothing bad but what is silenced" if any(a["silenced"] for a in roots) else "Nothing bad"
    so_far = "so far" if running else "was found"
    title = "No step has been reported yet"
    if run["last_step"] >= 0:
        title = f"{bad} {so_far}, at step {run['last_step']}"
    return Headline("muted", word, title, reasons)


def counts(alert: dict[str, Any], verdict: dict[str, Any]) -> bool:
    """Whether an alert is open, or of the job's last launch."""
    last = verdict["first_start"] <= alert["start"] <= verdict["start"]
    return bool(alert["state"] == "open" or last)


def said_by(said: dict[str, Any] | None) -> str:
    """`by Ada until 2031-05-01 08:00 UTC`, of an acknowledgement or a silence."""
    if said is None:
        return ""
    parts = [f"by {said['name']}"] if said["name"] else []
    if said["until"]:
        parts.append(f"until {said['until'][:16].replace('T', ' ')} UTC")
    return " ".join(parts)


def _silenced(hushed: Sequence[dict[str, Any]], verdict: dict[str, Any]) -> Headline:
    people = "; ".join(dict.fromkeys(filter(None, (said_by(a["silence"]) for a in hushed))))
    over = sum(a["state"] == "resolved" for a in hushed)
    resolved = f" ({over} resolved)" if over else ""
    title = f"{count(len(hushed), 'critical problem')}{resolved}, silenced {people}".rstrip()
    reasons = [f" ({a['silence']['reason']})" if a["silence"]["reason"] else "" for a in hushed]
    details = [f"{a['title']}{why}" for a, why in zip(hushed, reasons, strict=True)]
    details.append(f"Silenced alerts do not count for the verdict: {verdict['verdict']}.")
    return Headline("muted", "Silenced, not solved", title, tuple(details))


def _fine(facts: RunFacts, running: bool) -> Headline:
    run, checks, roots = facts.run, facts.verdict["checks"], facts.roots
    passed = sum(check["state"] == "passed" for check in checks)
    left = sum(check["state"] == "not_run" for check in checks)
    quiet = sum(a["state"] == "open" and a["silenced"] for a in roots)
    over = sum(a["state"] == "resolved" and a["severity"] != "info" for a in roots)
    notes = [f"{count(left, 'check')} could not run."] if left else []
    notes += [f"{count(quiet, 'open alert')} silenced."] if quiet else []
    notes += [f"{count(over, 'alert')} opened and resolved."] if over else []
    title = (
        f"{count(passed, 'check')} passed on {count(run['world_size'], 'rank')} through step "
        f"{run['evaluated_step']}"
    )
    word = f"No problems found{' so far' if running else ''} ({passed} of {len(checks)} checks)"
    return Headline("ok", word, title, tuple(notes))


def _errors(run: dict[str, Any]) -> Iterator[str]:
    """What failed ranks said, the first to fall first: it takes the others along."""
    failed = [one for one in run["rank_status"] if one["state"] == "failed"]
    for one in sorted(failed, key=lambda r: (r["last_step"], r["last_seen_at"]))[:_MOST_ERRORS]:
        yield f"Rank {one['rank']}, after step {one['last_step']}: {one['error'] or 'no message'}"


def _sentence(text: str) -> str:
    # One that begins with the name of a kind stays as it is.
    return text if "." in text.split(" ")[0] else text[:1].upper() + text[1:]


def _lasted(alert: dict[str, Any]) -> str:
    """What an alert says, which speaks of now, and when it was over."""
    if alert["state"] == "open":
        return str(alert["title"])
    return f"{alert['title']} (over, last seen at step {alert['last_step']})"
