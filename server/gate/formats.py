"""How the gate reports its verdict: to a person in a log, and to the tools of a pipeline."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any
from xml.etree import ElementTree

from rankscope.agent import wire
from rankscope.server.detectors.mechanisms.wording import count

Json = dict[str, Any]

# How the checks are called that compare a run with earlier ones: `regression.loss` and so on.
REGRESSION = "regression"
_WIDTH = 100
# XML 1.0 has no way to write these, and in a terminal they may do things.
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_SARIF_LEVELS = {"info": "note", "warning": "warning", "critical": "error"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A verdict with what it rests on, all of it as the REST interface gives it.

    Attributes:
        address: of the run's page.
        alerts: that count for the verdict, consequences too, newest first.
        required: what has to be judged for a pass: name, state, by, why.
        state: of the run; empty where an older server does not report.
        sampled: share of the steps that were sampled in full; None where no agent says so.
        not_seen: what could not have been seen at the other steps: a sentence, or empty.
        evaluated: whether the server has evaluated all that it has of the run.
        kinds: kinds that were asked for; empty: all.
        against: what a comparison with earlier runs came to, as JSON; None: none was asked for.
        beside: what was compared with what: sentences.
    """

    run: str
    address: str
    verdict: str
    reasons: tuple[str, ...]
    checks: tuple[Mapping[str, str], ...]
    alerts: tuple[Mapping[str, Any], ...]
    required: tuple[Mapping[str, Any], ...] = ()
    state: str = ""
    evaluated: bool = True
    sampled: float | None = None
    not_seen: str = ""
    fail_on: str = "warning"
    kinds: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()
    against: Mapping[str, Any] | None = None
    beside: tuple[str, ...] = ()

    @property
    def is_being_evaluated(self) -> bool:
        """Whether the run has ended and its verdict waits for the server alone."""
        return not self.evaluated and self.state not in ("", "running")

    def coverage(self) -> list[str]:
        """What was required, what was not checked and what was sampled: sentences."""
        failed_kinds = [_required(self.required)] if self.required else []
        kinds = [check for check in self.checks if not is_regression(check)]
        if left_out := [check for check in kinds if check["state"] == "not_run"]:
            reasons = Counter(_reason(check["why"]) for check in left_out)
            why = "; ".join(f"{reason}: {number}" for reason, number in reasons.most_common())
            of = count(len(kinds), "kind")
            failed_kinds.append(f"Not checked: {len(left_out)} of {of} of alert ({why}).")
        if self.sampled is not None:
            failed_kinds.append(f"Steps sampled in full on every rank: {_share(self.sampled)}.")
        if self.not_seen:
            failed_kinds.append(self.not_seen)
        return [*failed_kinds, *self.beside]

    def shown(self) -> list[Mapping[str, Any]]:
        """The alerts to report: roots, and whatever is of a kind that was asked for."""
        by_id = {alert["id"]: alert for alert in self.alerts}
        chosen = []
        for alert in self.alerts:
            root = by_id.get(alert["parent"], alert)
            if {alert["kind"], root["kind"]} & self.ignored:
                continue
            if alert["kind"] in self.kinds or (alert["parent"] is None and not self.kinds):
                chosen.append(alert)
        return sorted(chosen, key=lambda alert: (alert["first_step"], alert["id"]))

    def severity(self, alert: Mapping[str, Any]) -> str:
        """Of the alert and what follows from it, the highest."""
        severities = [str(a["severity"]) for a in (alert, *self.consequences(alert))]
        return max(severities, key=wire.SEVERITIES.index)

    def consequences(self, alert: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """What follows from an alert, by steps."""
        found = [a for a in self.alerts if a["parent"] == alert["id"]]
        return sorted(found, key=lambda a: (a["first_step"], a["id"]))

    def fails(self, alert: Mapping[str, Any]) -> bool:
        """Whether the alert is severe enough, and not silenced."""
        severities = wire.SEVERITIES
        severe = severities.index(self.severity(alert)) >= severities.index(self.fail_on)
        return severe and not alert.get("silenced", False)

    def checks_in(self, state: str) -> list[Mapping[str, str]]:
        """Checks with that outcome."""
        return [check for check in self.checks if check["state"] == state]


def is_regression(check: Mapping[str, str]) -> bool:
    """Whether a check compares the run with earlier ones."""
    return check["name"].partition(".")[0] == REGRESSION


def _share(sampled: float) -> str:
    percent = 100 * sampled
    # No more than there were: 99.96 % is not all of them.
    return "100 %" if percent >= 100 else f"{min(percent, 99.9):.3g} %"


def _required(required: Sequence[Mapping[str, Any]]) -> str:
    named = []
    for one in required:
        name, by = one["name"], one.get("by")
        if one["state"] == "not_applicable":
            named.append(f"{name} (does not apply)")
        elif by is None:
            named.append(f"{name} (not judged)")
        else:
            named.append(name if by == name else f"{name} (judged by {by} in its place)")
    states = Counter(one["state"] for one in required)
    if missing := states["not_judged"]:
        whole = f"{missing} of {len(required)} not judged"
    else:
        whole = "all that apply judged" if states["not_applicable"] else "all judged"
    return f"Required for a pass, {whole}: {', '.join(named)}."


def _reason(why: str) -> str:
    """What a check was not made for, without the particulars."""
    return why.partition(":")[0].strip()


def text(report: Report) -> str:
    """For a person who reads a log."""
    head = f"{report.verdict.upper()}  run {_line(report.run)}  {report.address}"
    return _clean("\n".join([head, *_text_lines(report)]))


def _text_lines(report: Report) -> Iterator[str]:
    alerts = report.shown()
    for reason in _omitted(report):
        yield from _wrapped(reason, "  ", "- ")
    for sentence in report.coverage():
        yield from _wrapped(sentence, "  ", "")
    for alert in alerts:
        notes = [alert["state"], *(["silenced"] if alert.get("silenced") else [])]
        yield ""
        yield f"  {alert['kind']}  {alert['severity']}  ({', '.join(notes)})"
        for label, value in _facts(report, alert):
            yield from _wrapped(value, "    ", f"{label}: " if label else "")
    failed_kinds = {alert["kind"] for alert in alerts}
    for title, state in (("failed too", "failed"), ("not checked", "not_run")):
        checks = [
            c
            for c in report.checks_in(state)
            if (c["name"] not in failed_kinds and not is_regression(c)) or state == "not_run"
        ]
        if checks:
            yield ""
            yield f"  {title}:"
        for check in checks:
            yield from _wrapped(f"{check['name']}: {check['why']}", "    ", "")
    passed = [c for c in report.checks_in("passed") if not is_regression(c)]
    if passed:
        yield ""
        yield from _wrapped(", ".join(check["name"] for check in passed), "  ", "passed: ")
    # What failed of these is among the reasons.
    if beside := [c for c in report.checks_in("passed") if is_regression(c)]:
        yield ""
        yield "  no worse than the baseline:"
        for check in beside:
            yield from _wrapped(f"{check['name']}: {check['why']}", "    ", "")


def _omitted(report: Report) -> list[str]:
    """Reasons that the alerts do not show, such as the state of the run."""
    kinds = tuple(f"{alert['kind']} (" for alert in report.shown())
    return [reason for reason in report.reasons if not reason.startswith(kinds)]


def _facts(report: Report, alert: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "", alert["title"]
    steps = f"{alert['first_step']}, last seen at step {alert['last_step']}"
    yield "since step", steps
    if alert["ranks"]:
        yield "ranks", ", ".join(map(str, alert["ranks"]))
    if alert["stage"]:
        yield "first broken link", alert["stage"]
    if alert["tensors"]:
        yield "tensors", _few(alert["tensors"])
    yield "cause", alert["cause"]
    yield "remedy", alert["remedy"]
    follows = report.consequences(alert)
    if follows:
        yield "consequences", _few([f"{a['kind']} (step {a['first_step']})" for a in follows])


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _wrapped(value: str, indent: str, label: str) -> list[str]:
    return textwrap.wrap(
        label + " ".join(value.split()),
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        # Names of tensors and addresses stay whole, to be copied.
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_json(report: Report) -> str:
    """One object: run, address, verdict, reasons, what was required, checks and alerts."""
    body: Json = {
        "run": report.run,
        "address": report.address,
        "verdict": report.verdict,
        "reasons": report.reasons,
        "required": report.required,
        "not_checked": [{"name": c["name"], "why": c["why"]} for c in report.checks_in("not_run")],
        "coverage": report.coverage(),
        "sampled": report.sampled,
        "not_seen": report.not_seen or None,
        "checks": report.checks,
        "alerts": report.shown(),
    }
    if report.against is not None:
        body["against"] = report.against
    return json.dumps(body, indent=2, allow_nan=False)


def junit(report: Report) -> str:
    """JUnit XML: the run as a whole is a test case, and so is every check."""
    suites = ElementTree.Element("testsuites", name="rankscope")
    suite = ElementTree.SubElement(suites, "testsuite", name=_clean(report.run))
    if coverage := report.coverage():
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in _properties(report).items():
            ElementTree.SubElement(properties, "property", name=name, value=_clean(value))
    whole = "\n".join([*report.reasons, *coverage, report.address])
    _case(suite, report, "verdict", _WHOLE[report.verdict], whole)
    details: dict[str, list[str]] = {}
    for alert in report.shown():
        details.setdefault(alert["kind"], []).append(_sentence(report, alert))
    for check in report.checks:
        body = "\n".join([check["why"], *details.get(check["name"], [])])
        _case(suite, report, check["name"], _OUTCOMES[check["state"]], body)
    for element in (suites, suite):
        for name, tag in (("tests", "testcase"), ("failures", "failure")):
            element.set(name, str(len(list(suite.iter(tag)))))
        for name, tag in (("errors", "error"), ("skipped", "skipped")):
            element.set(name, str(len(list(suite.iter(tag)))))
    ElementTree.indent(suites)
    written = ElementTree.tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{written}'


def _properties(report: Report) -> dict[str, str]:
    """What was required and what was not checked, by name."""
    return {
        "verdict": report.verdict,
        "required": ", ".join(one["name"] for one in report.required),
        "judged": ", ".join(one["by"] for one in report.required if one.get("by")),
        "not_checked": ", ".join(check["name"] for check in report.checks_in("not_run")),
        "coverage": " ".join(report.coverage()),
    }


_WHOLE = {"pass": None, "fail": "failure", "pending": "error"}
_OUTCOMES = {"passed": None, "failed": "failure", "not_run": "skipped"}


def _case(
    suite: ElementTree.Element, report: Report, name: str, outcome: str | None, body: str
) -> None:
    case = ElementTree.SubElement(
        suite, "testcase", classname=_clean(f"rankscope.{report.run}"), name=name
    )
    if outcome is None:
        return
    first = _clean(body).partition("\n")[0]
    element = ElementTree.SubElement(case, outcome, message=first)
    if outcome != "skipped":
        element.set("type", name)
        element.text = _clean(body)


def sarif(report: Report) -> str:
    """SARIF 2.1.0: an alert is a result; what could not be checked is a notification."""
    alerts = report.shown()
    worse = [check for check in report.checks_in("failed") if is_regression(check)]
    kinds = sorted({alert["kind"] for alert in alerts} | {check["name"] for check in worse})
    notifications = [
        {"level": "note", "message": {"text": f"{check['name']} was not run: {check['why']}"}}
        for check in report.checks_in("not_run")
    ]
    notifications += [{"level": "note", "message": {"text": s}} for s in report.coverage()]
    notifications += [{"level": "warning", "message": {"text": r}} for r in report.reasons]
    run: Json = {
        "tool": {
            "driver": {
                "name": "rankscope",
                "version": metadata.version("rankscope"),
                "rules": [{"id": kind, "name": kind} for kind in kinds],
            }
        },
        "invocations": [
            {
                "executionSuccessful": report.verdict != "pending",
                "toolExecutionNotifications": notifications,
            }
        ],
        "automationDetails": {"id": f"rankscope/{report.run}"},
        "properties": {
            "verdict": report.verdict,
            "address": report.address,
            "required": report.required,
            "notChecked": [check["name"] for check in report.checks_in("not_run")],
            **({} if report.against is None else {"against": report.against}),
        },
        "results": [
            *(_result(report, alert, kinds.index(alert["kind"])) for alert in alerts),
            *(_worse(report, check, kinds.index(check["name"])) for check in worse),
        ],
    }
    return json.dumps({"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _result(report: Report, alert: Mapping[str, Any], rule: int) -> Json:
    result: Json = {
        "ruleId": alert["kind"],
        "ruleIndex": rule,
        "level": _SARIF_LEVELS[report.severity(alert)],
        "message": {"text": _sentence(report, alert)},
        "partialFingerprints": {"alert/v1": alert["id"]},
        "hostedViewerUri": report.address,
        "properties": {
            name: alert[name] for name in ("ranks", "first_step", "last_step", "stage", "state")
        },
    }
    if alert["tensors"]:
        names = [{"fullyQualifiedName": name, "kind": "member"} for name in alert["tensors"]]
        result["locations"] = [{"logicalLocations": names}]
    if alert.get("silenced"):
        result["suppressions"] = [{"kind": "external", "status": "accepted"}]
    return result


def _worse(report: Report, check: Mapping[str, str], rule: int) -> Json:
    """A measure in which the run is worse than earlier ones."""
    return {
        "ruleId": check["name"],
        "ruleIndex": rule,
        "level": "error",
        "message": {"text": f"{check['why']}\n{report.address}"},
        "partialFingerprints": {"regression/v1": f"{report.run}/{check['name']}"},
        "hostedViewerUri": report.address,
    }


def github(report: Report) -> str:
    """Workflow commands, which become annotations, and a last line for the log."""
    lines = []
    for alert in report.shown():
        level = "warning" if alert["severity"] != "info" else "notice"
        if report.fails(alert):
            level = "error"
        lines.append(_command(level, f"{alert['kind']} in run {report.run}", report, alert))
    untold = "; ".join(_omitted(report))
    if untold:
        level = "error" if report.verdict == "fail" else "warning"
        title = _property(f"run {report.run}: {report.verdict}")
        lines.append(f"::{level} title={title}::{_data(untold)}")
    if coverage := report.coverage():
        told = [c for c in report.checks_in("passed") if is_regression(c)]
        told += report.checks_in("not_run")
        lines_of = [f"{check['name']}: {check['why']}" for check in told]
        title = _property(f"run {report.run}: what was checked")
        lines.append(f"::notice title={title}::{_data(chr(10).join([*coverage, *lines_of]))}")
    # A run's id at the start of a line must not be a workflow command.
    lines.append(f"{report.verdict.upper()}  run {_line(report.run)}  {report.address}")
    return "\n".join(lines)


def _command(level: str, title: str, report: Report, alert: Mapping[str, Any]) -> str:
    return f"::{level} title={_property(title)}::{_data(_sentence(report, alert))}"


def _data(value: str) -> str:
    escaped = _clean(value).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return escaped


def _property(value: str) -> str:
    return _data(value).replace(":", "%3A").replace(",", "%2C")


def _line(value: str) -> str:
    return " ".join(_clean(value).split())


def _sentence(report: Report, alert: Mapping[str, Any]) -> str:
    facts = [f"{label}: {value}" if label else value for label, value in _facts(report, alert)]
    return "\n".join([*facts, report.address])


def _clean(value: str) -> str:
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", value)


FORMATS: dict[str, Callable[[Report], str]] = {
    "text": text,
    "json": as_json,
    "junit": junit,
    "sarif": sarif,
    "github": github,
}
