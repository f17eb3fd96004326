"""`rankscope db`: maintains a database: its schema, its old runs, its copies."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, get_args

from sqlalchemy import Engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from rankscope.server.api.audit import entry_model
from rankscope.server.commands import client
from rankscope.server.commands.database_options import (
    add_url,
    age,
    database_text,
    file_text,
    operator,
    shown,
)
from rankscope.server.detectors.mechanisms.wording import count
from rankscope.server.settings import Settings, default_database
from rankscope.server.storage.access import audit
from rankscope.server.storage.database import distribution, migrate, partitions
from rankscope.server.storage.database.engine import open_engine, reading
from rankscope.server.storage.maintenance import backup, damage, pruning
from rankscope.server.storage.reading import runs

# What of a damaged database is said.
_SHOWN = 50


def db(argv: Sequence[str]) -> int:
    """`rankscope db ACTION`; `_parser` has the actions."""
    options = _parser().parse_args(argv)
    engine = None
    try:
        settings = Settings(database=options.db or default_database())
        if options.action == "restore":
            return _restore(options, settings)
        engine = open_engine(settings.database)
        if options.action == "upgrade":
            migrate.upgrade(engine)
        have, head = migrate.current(engine), migrate.head()
        if options.action in ("upgrade", "current"):
            print(
                f"{have or 'empty'}{'' if have == head else f' (this version works with {head})'}"
            )
            return client.OK
        if have is None:
            return _complain(
                f"{shown(settings.database)} is empty: no server has used it. Is it the right "
                "one? If so, `rankscope db upgrade` makes its tables"
            )
        # A copy may be of any version: what puts it back is the one that made it, or a newer one.
        if have != head and options.action != "backup":
            # It says so where a newer version has been there.
            migrate.check(engine)
            return _complain(f"the database has schema {have}: call `rankscope db upgrade` first")
        maintain: Callable[[argparse.Namespace, Engine], int] = options.maintain
        return maintain(options, engine)
    except (ValueError, migrate.SchemaError, partitions.NotPossible, backup.NotCopied) as error:
        return _complain(str(error))
    except OSError as error:
        return _complain(file_text(error))
    except (SQLAlchemyError, ImportError) as error:
        return _complain(database_text(settings.database, error))
    finally:
        if engine is not None:
            engine.dispose()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rankscope db", description="Maintain the database.")
    add_url(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, does: str, maintain: Any = None) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")
        # Before the action or behind it: what is left out here must not undo what came before.
        add_url(made, default=argparse.SUPPRESS)
        made.set_defaults(maintain=maintain)
        return made

    action("upgrade", "bring its schema to the one that this version works with")
    action("current", "say which schema it has")
    prune = action("prune", "delete old runs, with all that belongs to them", _prune)
    prune.add_argument(
        "--older-than",
        metavar="AGE",
        required=True,
        type=partial(age, nothing="would be all runs"),
        help="runs that nothing was heard of for this long, for example 90d or 36h",
    )
    prune.add_argument("--project", help="runs of this project alone")
    prune.add_argument(
        "--dry-run", action="store_true", help="say what would go, and delete nothing"
    )
    gone = action("delete", "delete single runs that have ended", _delete_runs)
    gone.add_argument("runs", metavar="RUN", nargs="+", help="name of a run")
    action(
        "partition", "cut large tables into ranges of runs, for cheap pruning (PostgreSQL)", _cut
    )
    action("distribute", "put the tables onto the nodes of a Citus cluster", _distribute)
    copy = action("backup", "write a copy of it into one file, while servers use it", _backup)
    copy.add_argument("file", metavar="FILE", type=Path, help="a new file")
    back = action("restore", "put a copy back, as a database that was empty or not there")
    back.add_argument("file", metavar="FILE", type=Path, help="what `rankscope db backup` wrote")
    acts = action("audit", "list administrative acts: who did what, when, from where", _audit)
    acts.add_argument("--limit", type=int, default=100, help="newest entries; default: %(default)s")
    acts.add_argument("--act", choices=get_args(audit.Act), help="acts of this kind alone")
    acts.add_argument("--json", action="store_true", help="print JSON")
    action("check", "read all of it; exit code 1 where something is damaged", _check)
    return parser


def _audit(options: argparse.Namespace, engine: Engine) -> int:
    if options.limit < 1:
        return _complain("--limit is at least 1")
    with reading(engine) as connection:
        found, _ = audit.entries(connection, limit=options.limit, act=options.act)
    if options.json:
        items = [entry_model(one).model_dump(mode="json") for one in found]
        print(json.dumps({"items": items}, indent=2))
        return client.OK
    rows = [("WHEN", "WHO", "FROM", "ACT", "SUBJECT", "DETAILS")]
    for one in found:
        when = f"{datetime.fromtimestamp(one.at, UTC):%Y-%m-%d %H:%M:%S} UTC"
        who = one.by.name or "-"
        rows.append((when, who, one.by.origin, one.act, one.subject, json.dumps(dict(one.details))))
    print(*client.table(rows), sep="\n")
    return client.OK


def _prune(options: argparse.Namespace, engine: Engine) -> int:
    which: dict[str, Any] = {"seconds": options.older_than, "project": options.project}
    old = pruning.old_runs(engine, **which)
    gone: Iterable[pruning.OldRun] = (
        (run for run in old if not run.running)
        if options.dry_run
        else pruning.prune(engine, by=operator(), **which)
    )
    number = 0
    for run in gone:
        seen = datetime.fromtimestamp(run.last_seen_at, UTC)
        print(f"{run.id} ({run.project}), last heard of {seen:%Y-%m-%d %H:%M} UTC", flush=True)
        number += 1
    print(f"{count(number, 'run')} {'would be deleted' if options.dry_run else 'deleted'}")
    if left := sum(run.running for run in old):
        print(
            f"{count(left, 'run')} left that no server has seen end: `rankscope serve` on this "
            "database takes them for lost within minutes"
        )
    return client.OK


def _delete_runs(options: argparse.Namespace, engine: Engine) -> int:
    code = client.OK
    for name in dict.fromkeys(options.runs):
        with reading(engine) as connection:
            row = runs.find_run(connection, name)
        if row is None:
            print(f"{name}: there is no such run", file=sys.stderr)
            code = client.UNKNOWN_RUN
        elif not pruning.delete_run(engine, row.key, by=operator()):
            print(
                f"{name}: it is running; stop its job, or wait until `rankscope serve` takes it "
                "for lost",
                file=sys.stderr,
            )
            code = code or client.FAILED
        else:
            print(f"{name} ({row.project}) deleted", flush=True)
    return code


def _cut(options: argparse.Namespace, engine: Engine) -> int:
    cut = partitions.partition(engine)
    print(f"cut: {', '.join(cut)}" if cut else "all large tables are cut already")
    return client.OK


def _distribute(options: argparse.Namespace, engine: Engine) -> int:
    print(f"{count(distribution.distribute(engine), 'table')} distributed")
    return client.OK


def _backup(options: argparse.Namespace, engine: Engine) -> int:
    backup.backup(engine, options.file)
    print(f"{options.file}: {_size(options.file)}")
    return client.OK


def _restore(options: argparse.Namespace, settings: Settings) -> int:
    url = make_url(settings.database)
    backup.restore(options.file, url)
    engine = open_engine(settings.database)
    try:
        have, head = migrate.current(engine), migrate.head()
    finally:
        engine.dispose()
    print(f"{shown(settings.database)} is {options.file} again")
    if have != head:
        print(f"It has schema {have}: `rankscope serve` or `rankscope db upgrade` upgrades it")
    return client.OK


def _check(options: argparse.Namespace, engine: Engine) -> int:
    number = 0

    def say(found: damage.Damage) -> None:
        nonlocal number
        number += 1
        if number <= _SHOWN:
            print(f"run {found.run}: {found.text}" if found.run else found.text, flush=True)

    held = damage.look_through(engine, say)
    if number > _SHOWN:
        print(f"and {number - _SHOWN} more")
    print(
        f"{count(held.runs, 'run')}, {held.rows:,} rows, {held.values:,} values: "
        f"{f'{number} wrong' if number else 'nothing wrong'}"
    )
    if number:
        print("`rankscope db restore` puts the last good copy back; runs not named here are whole")
    return client.FAILED if number else client.OK


def _size(path: Path) -> str:
    size = float(path.stat().st_size)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _complain(text: str) -> int:
    client.complain(text)
    return client.USAGE
