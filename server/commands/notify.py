"""`rankscope notify add|list|remove|test|log`: who is told of alerts, and what they were told."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

from pydantic import BaseModel
from sqlalchemy import Engine

from rankscope.agent import wire
from rankscope.server.api.notifications import notification_model, target_model
from rankscope.server.commands import database_options
from rankscope.server.commands.client import FAILED, OK, USAGE, complain, run_id, table
from rankscope.server.commands.database_options import add_url, operator
from rankscope.server.notifications import transports
from rankscope.server.notifications.message import example, time_text
from rankscope.server.storage.access import audit
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.judgement import notifications
from rankscope.server.storage.judgement.notifications import Notification, Outcome, Target
from rankscope.server.storage.reading import runs

_MAX_NAME = 250
_MAX_URL = 4000


def notify(argv: Sequence[str]) -> int:
    """`rankscope notify`; works on the database itself: who may write to it needs no token."""
    return database_options.call(_parser().parse_args(argv))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankscope notify",
        description="Who is told of alerts: chat, mail, pagers, webhooks, Alertmanager. A server\n"
        "that runs takes notice within some seconds.",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    actions = parser.add_subparsers(required=True, metavar="add|list|remove|test|log")
    add = actions.add_parser("add", help="tell somebody of alerts from now on")
    add.add_argument(
        "url",
        help="mailto://USER:PASSWORD@HOST?to=..., slack://..., msteams://..., pagerduty://..., and "
        "what else apprise knows; webhook://HOST/PATH (webhooks:// for https) for JSON; "
        "alertmanager://HOST:9093; otlp://HOST:4318 (otlps://) for log records of OpenTelemetry; "
        "cordon-webhook://HOST/PATH (cordon-webhooks://) and cordon-command://NAME for alerts that "
        "accuse a host",
    )
    add.add_argument("--name", type=_name, help="what it is called; default: its address, masked")
    add.add_argument(
        "--project",
        action="append",
        type=_name,
        metavar="NAME",
        help="of runs of this project alone; may be given several times",
    )
    add.add_argument(
        "--kind",
        action="append",
        type=_name,
        metavar="PATTERN",
        help="of these kinds of alerts alone, such as desync.*; may be given several times",
    )
    add.add_argument(
        "--severity",
        choices=wire.SEVERITIES,
        default="warning",
        help="of alerts of this severity or a higher one; default: warning",
    )
    add.set_defaults(do=_add)
    listed = actions.add_parser("list", help="who is told of what")
    listed.set_defaults(do=_list)
    remove = actions.add_parser("remove", help="tell somebody nothing more")
    remove.add_argument("id", help="its id, as `rankscope notify list` has it")
    remove.set_defaults(do=_remove)
    test = actions.add_parser("test", help="send a test message now")
    test.add_argument("id", help="its id, as `rankscope notify list` has it")
    test.set_defaults(do=_test)
    log = actions.add_parser("log", help="what was told, what waits, what failed and why")
    log.add_argument("run", nargs="?", type=run_id, metavar="RUN", help="of this run alone")
    log.add_argument("--pending", action="store_true", help="what waits or failed alone")
    log.set_defaults(do=_log)
    for action in (add, listed, remove, test, log):
        add_url(action)
        action.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = "".join(a.format_usage() for a in (add, listed, remove, test, log))
    return parser


def _add(engine: Engine, options: argparse.Namespace) -> int:
    url = options.url
    if len(url) > _MAX_URL:
        complain(f"an address of {len(url):,} characters: the most are {_MAX_URL:,}")
        return USAGE
    transports.check(url)
    with writing(engine) as connection:
        made = notifications.add_target(
            connection,
            name=options.name or transports.masked(url)[:_MAX_NAME],
            url=url,
            projects=options.project,
            kinds=options.kind,
            severity=options.severity,
            now=time.time(),
        )
        details = {"name": made.name, "address": transports.masked(url)}
        audit.record(connection, operator(), "target.add", made.id, details)
    if options.json:
        print(target_model(made, Outcome()).model_dump_json(indent=2))
        return OK
    print(f"{made.id} ({made.name}) is told of {_of_what(made)} from now on")
    complain(f"`rankscope notify test {made.id}` sends a test message")
    return OK


def _list(engine: Engine, options: argparse.Namespace) -> int:
    with reading(engine) as connection:
        found = notifications.targets(connection)
        outcomes = notifications.outcomes(connection)
    if options.json:
        _print_items([target_model(t, outcomes.get(t.id, Outcome())) for t in found])
    elif not found:
        print("Nobody is told of alerts. `rankscope notify add --help` says how.")
    else:
        rows = [("ID", "NAME", "ADDRESS", "OF WHAT")]
        rows += [(t.id, t.name, transports.masked(t.url), _of_what(t)) for t in found]
        print(*table(rows), sep="\n")
    return OK


def _remove(engine: Engine, options: argparse.Namespace) -> int:
    with writing(engine) as connection:
        there = notifications.remove_target(connection, options.id)
        if there:
            audit.record(connection, operator(), "target.remove", options.id, {})
    if not there:
        return _unknown(options.id)
    print(json.dumps({"removed": options.id}) if options.json else f"{options.id} removed")
    return OK


def _test(engine: Engine, options: argparse.Namespace) -> int:
    with reading(engine) as connection:
        found = [t for t in notifications.targets(connection) if t.id == options.id]
    if not found:
        return _unknown(options.id)
    error = ""
    try:
        transports.deliver(found[0].url, example("", time.time()))
    except transports.NotDelivered as why:
        error = str(why)
    if options.json:
        print(json.dumps({"delivered": not error, "error": error}, indent=2))
    elif not error:
        print(f"{found[0].name} has taken a test message")
    if error:
        complain(f"{found[0].name}: {error}")
        return FAILED
    return OK


def _log(engine: Engine, options: argparse.Namespace) -> int:
    with reading(engine) as connection:
        names = {t.id: t.name for t in notifications.targets(connection)}
        key = None
        if options.run is not None:
            known = runs.find_run(connection, options.run)
            if known is None:
                complain(f"there is no run {options.run!r}; `rankscope runs` lists them")
                return FAILED
            key = known.key
        found = notifications.log(connection, limit=200, run=key, open_only=options.pending)
    if options.json:
        _print_items([notification_model(run, title, one, names) for run, title, one in found])
    elif not found:
        print("Nothing was told, and nothing waits.")
    else:
        rows = [("WHEN", "RUN", "TO", "WHAT", "ALERT")]
        for run, title, one in found:
            when = one.told_at or one.wanted_at
            rows.append(
                (
                    "-" if when is None else time_text(when)[:19],
                    run,
                    names.get(one.target, one.target),
                    _state(one),
                    title,
                )
            )
        print(*table(rows), sep="\n")
    return OK


def _print_items(items: Sequence[BaseModel]) -> None:
    print(json.dumps({"items": [item.model_dump(mode="json") for item in items]}, indent=2))


def _unknown(target: str) -> int:
    complain(f"there is no target {target!r}; `rankscope notify list` shows which there are")
    return FAILED


def _of_what(target: Target) -> str:
    kinds = "alerts" if target.kinds is None else ", ".join(target.kinds)
    where = "" if target.projects is None else f" in {', '.join(target.projects)}"
    least = {
        "info": "",
        "warning": ", warning or critical",
        "critical": ", critical",
    }[target.severity]
    return f"{kinds}{where}{least}"


def _state(one: Notification) -> str:
    if one.error and one.due_at is None:
        return f"given up: {one.error}"
    if one.error:
        return f"failed {one.failures} times: {one.error}"
    if one.wanted_at is not None:
        return "waits"
    return one.told or "nothing to tell any more"


def _name(text: str) -> str:
    if not text.strip() or len(text) > _MAX_NAME or not text.isprintable():
        raise argparse.ArgumentTypeError(
            f"a name has 1 to {_MAX_NAME} printable characters, not {text[:40]!r}"
        )
    return text
