"""`rankscope token create|list|revoke`: who may read, write and administer."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from rankscope.server.commands import database_options
from rankscope.server.commands.client import FAILED, OK, complain, table
from rankscope.server.commands.database_options import add_url, age, operator
from rankscope.server.storage.access import audit, tokens
from rankscope.server.storage.access.tokens import SCOPES, Token, digest_of
from rankscope.server.storage.database.engine import reading, writing

_USUAL = ("read", "write")
_MAX_NAME = 250
# Of letters and digits: 190 random bits, which nobody guesses. The server keeps a plain digest.
_LEAST_SECRET = 32
# The end of the year 9999, after which there are no dates.
_LAST_SECOND = 253_402_300_799


def token(argv: Sequence[str]) -> int:
    """`rankscope token`; works on the database itself: who may write to it needs no token."""
    return database_options.call(_parser().parse_args(argv))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankscope token",
        description="Make, list and revoke tokens. From the first one on the server asks for one\n"
        "with every request; a server that runs takes notice within some seconds.",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    actions = parser.add_subparsers(required=True, metavar="create|list|revoke")
    create = actions.add_parser("create", help="make a token; its secret is shown this once")
    create.add_argument("name", type=_name, help="what it is for, for example ci or cluster-3")
    create.add_argument(
        "--scope",
        action="append",
        choices=SCOPES,
        help="read: look at runs; write: send batches, as agents do; admin: all that, and silence, "
        "acknowledge and set. May be given several times; default: read and write",
    )
    create.add_argument(
        "--project",
        action="append",
        type=_name,
        metavar="NAME",
        help="bind it to a project; may be given several times; default: all projects",
    )
    create.add_argument(
        "--expires", type=_lasting, metavar="AGE", help="for example 90d or 12h; default: never"
    )
    create.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="take the secret from a file, in which a store of secrets has put it: at least "
        f"{_LEAST_SECRET} random characters. Where there is such a token already, nothing happens",
    )
    create.set_defaults(do=_create)
    listed = actions.add_parser("list", help="the tokens there are, without their secrets")
    listed.set_defaults(do=_list)
    revoke = actions.add_parser("revoke", help="end a token for ever")
    revoke.add_argument("id", help="its id, as `rankscope token list` has it")
    revoke.set_defaults(do=_revoke)
    for action in (create, listed, revoke):
        add_url(action)
        action.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = "".join(a.format_usage() for a in (create, listed, revoke))
    return parser


def _create(engine: Engine, options: argparse.Namespace) -> int:
    now = time.time()
    given = None if options.secret_file is None else _secret_in(options.secret_file)
    with writing(engine) as connection:
        known = None if given is None else tokens.by_digest(connection).get(digest_of(given))
        if known is not None:
            return _is_there(known, options, now)
        made, secret = tokens.create(
            connection,
            name=options.name,
            scopes=options.scope or _USUAL,
            projects=options.project,
            now=now,
            expires_at=None if options.expires is None else now + options.expires,
            secret=given,
        )
        audit.record(connection, operator(), "token.create", made.id, _about(made))
    if options.json:
        shown = {} if given else {"token": secret}
        print(json.dumps({**_fields(made, now), **shown}, indent=2))
        return OK
    if given:
        complain(f"token {made.id} ({made.name}): {_what(made)}, by {options.secret_file}")
    else:
        print(secret)
        complain(
            f"token {made.id} ({made.name}): {_what(made)}. Its secret is not shown again; give it "
            "to trainers and commands as RANKSCOPE_TOKEN"
        )
    where = engine.url.render_as_string(hide_password=True)
    # Whoever serves another one would take it for closed.
    new = ", which no server has used yet: is it the one that you serve?" if options.unused else ""
    complain(f"it holds for servers on {where}{new}")
    return OK


def _secret_in(path: Path) -> str:
    """The secret that a file holds.

    Raises:
        ValueError: it is none.
    """
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    if len(text) < _LEAST_SECRET or not text.isascii() or not text.isprintable() or " " in text:
        # Which it is stays unsaid.
        raise ValueError(
            f"{path}: a secret has at least {_LEAST_SECRET} characters of ASCII without spaces; "
            "make one with: openssl rand -hex 32"
        )
    return text


def _is_there(known: Token, options: argparse.Namespace, now: float) -> int:
    """What is said of a token that was made by the same secret before."""
    if not known.holds(now):
        complain(f"token {known.id} ({known.name}) has had this secret and ended: take another one")
        return FAILED
    if options.json:
        print(json.dumps(_fields(known, now), indent=2))
    else:
        complain(f"token {known.id} ({known.name}) has this secret already: {_what(known)}")
    return OK


def _list(engine: Engine, options: argparse.Namespace) -> int:
    now = time.time()
    with reading(engine) as connection:
        found = list(tokens.by_digest(connection).values())
    if options.json:
        print(json.dumps({"items": [_fields(t, now) for t in found]}, indent=2))
    elif not found:
        print("No tokens: whoever reaches the server may do everything.")
    else:
        rows = [("ID", "NAME", "SCOPES", "PROJECTS", "CREATED", "STATE")]
        for one in found:
            fields = _fields(one, now)
            projects = "all" if one.projects is None else " ".join(fields["projects"])
            state = fields["state"]
            if state == "holds" and one.expires_at is not None:
                state = f"until {_day(one.expires_at)}"
            row = (one.id, one.name, " ".join(one.scopes), projects, _day(one.created_at), state)
            rows.append(row)
        print(*table(rows), sep="\n")
    return OK


def _revoke(engine: Engine, options: argparse.Namespace) -> int:
    now = time.time()
    with writing(engine) as connection:
        gone = tokens.revoke(connection, options.id, now=now)
        if gone is not None:
            audit.record(connection, operator(), "token.revoke", gone.id, _about(gone))
    if gone is None:
        complain(f"there is no token {options.id!r}; `rankscope token list` shows which there are")
        return FAILED
    if options.json:
        print(json.dumps(_fields(gone, now), indent=2))
    else:
        print(f"{gone.id} ({gone.name}) revoked")
    return OK


def _fields(one: Token, now: float) -> dict[str, Any]:
    state = "revoked" if one.revoked_at is not None else "holds" if one.holds(now) else "expired"
    return {
        "id": one.id,
        "name": one.name,
        "scopes": list(one.scopes),
        "projects": None if one.projects is None else sorted(one.projects),
        "created_at": _time(one.created_at),
        "expires_at": _time(one.expires_at),
        "revoked_at": _time(one.revoked_at),
        "state": state,
    }


def _about(one: Token) -> dict[str, Any]:
    """What the audit log says of a token."""
    projects = None if one.projects is None else sorted(one.projects)
    return {"name": one.name, "scopes": list(one.scopes), "projects": projects}


def _what(one: Token) -> str:
    where = "all projects" if one.projects is None else ", ".join(sorted(one.projects))
    end = "" if one.expires_at is None else f", until {_day(one.expires_at)}"
    return f"{' and '.join(one.scopes)} in {where}{end}"


def _day(seconds: float) -> str:
    if seconds > _LAST_SECOND:
        return "after 9999"
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def _time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(min(seconds, _LAST_SECOND), UTC).isoformat()


def _lasting(text: str) -> float:
    """An age that ends within the years that there are."""
    seconds = age(text)
    if seconds > _LAST_SECOND - time.time():
        raise argparse.ArgumentTypeError(f"{text[:40]!r} ends beyond the year 9999")
    return seconds


def _name(text: str) -> str:
    if not text.strip() or len(text) > _MAX_NAME or not text.isprintable():
        raise argparse.ArgumentTypeError(
            f"a name has 1 to {_MAX_NAME} printable characters, not {text[:40]!r}"
        )
    return text
