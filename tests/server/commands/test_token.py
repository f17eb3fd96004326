"""`rankscope token`, and what `rankscope serve` makes of tokens."""

import hashlib
import json
import sqlite3

import pytest

from rankscope.server import cli
from rankscope.server.commands.token import token


def called(command, *arguments):
    try:
        return command(arguments)
    except SystemExit as ended:  # argparse's way
        return ended.code


@pytest.fixture
def db(tmp_path):
    return f"sqlite:///{tmp_path / 'test.db'}"


def test_create_list_revoke(db, capsys):
    assert called(token, "list", "--db", db) == cli.OK
    assert "whoever reaches the server may do everything" in capsys.readouterr().out
    assert called(token, "create", "ci", "--expires", "90d", "--db", db) == cli.OK
    printed, said = capsys.readouterr()
    assert printed.startswith("rankscope_")
    assert printed.count("\n") == 1  # `RANKSCOPE_TOKEN=$(rankscope token create ci)`
    assert "read and write in all projects, until 20" in said
    made = ("create", "old", "--scope", "admin", "--project", "a", "--project", "b", "--json")
    assert called(token, *made, "--db", db) == cli.OK
    second = json.loads(capsys.readouterr().out)
    assert (second["scopes"], second["projects"]) == (["admin"], ["a", "b"])
    assert second["token"].startswith("rankscope_")
    assert called(token, "revoke", second["id"], "--db", db) == cli.OK
    capsys.readouterr()
    assert called(token, "list", "--json", "--db", db) == cli.OK
    [first, gone] = json.loads(capsys.readouterr().out)["items"]
    assert (first["name"], first["state"], gone["state"]) == ("ci", "holds", "revoked")
    assert "token" not in first
    assert called(token, "list", "--db", db) == cli.OK
    table = capsys.readouterr().out
    assert "ci    read write  all" in table
    assert printed.strip() not in table


def test_a_secret_of_a_store_is_taken_over_once(db, tmp_path, capsys):
    file = tmp_path / "secret"
    file.write_text("a" * 16 + "B" * 16 + "\n")
    words = ("create", "admin", "--scope", "admin", "--secret-file", str(file), "--db", db)
    for said in ("admin in all projects, by", "has this secret already: admin in all projects"):
        assert called(token, *words) == cli.OK
        printed, complaints = capsys.readouterr()
        assert said in complaints
        assert "aaaaBBBB" not in printed + complaints
    assert called(token, "list", "--json", "--db", db) == cli.OK
    [made] = json.loads(capsys.readouterr().out)["items"]
    with sqlite3.connect(tmp_path / "test.db") as connection:
        [(digest,)] = connection.execute("select digest from access_token")
    assert digest == hashlib.sha256(file.read_text().strip().encode()).hexdigest()
    # One that was revoked does not come back with the next start.
    assert called(token, "revoke", made["id"], "--db", db) == cli.OK
    assert called(token, *words) == cli.FAILED
    assert "take another one" in capsys.readouterr().err


@pytest.mark.parametrize("secret", ["", "short", "x" * 31, "two words " * 8, "\u00e4" * 40])
def test_a_secret_that_could_be_guessed_or_sent_by_no_header_is_refused(
    secret, db, tmp_path, capsys
):
    file = tmp_path / "secret"
    file.write_text(secret)
    assert called(token, "create", "admin", "--secret-file", str(file), "--db", db) == cli.USAGE
    said = capsys.readouterr().err
    assert "at least 32 characters" in said
    assert not secret or secret not in said
    assert called(token, "create", "a", "--secret-file", f"{file}x", "--db", db) == cli.USAGE
    assert called(token, "list", "--db", db) == cli.OK
    assert "No tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("create", " "), "a name has 1 to 250 printable characters"),
        (("create", "ci", "--scope", "root"), "invalid choice: 'root'"),
        (("create", "ci", "--expires", "soon"), "'soon' is no age"),
        (("create", "ci", "--expires", "0d"), "no time at all"),
        (("create", "ci", "--expires", "9999999d"), "beyond the year 9999"),
        (("create", "ci", "--expires", "9" * 400 + "d"), "is no age"),
        ((), "create|list|revoke"),
    ],
)
def test_wrong_usage(db, capsys, arguments, said):
    where = ("--db", db) if arguments else ()
    assert called(token, *arguments, *where) == cli.USAGE
    assert said in capsys.readouterr().err


def test_tokens_that_end_beyond_all_years_are_listed(db, capsys):
    assert called(token, "create", "ci", "--expires", "1d", "--db", db) == cli.OK
    with sqlite3.connect(db.removeprefix("sqlite:///")) as connection:
        connection.execute("UPDATE access_token SET expires_at = 1e15")
    capsys.readouterr()
    assert called(token, "list", "--db", db) == cli.OK
    assert "until after 9999" in capsys.readouterr().out
    assert called(token, "list", "--json", "--db", db) == cli.OK
    [listed] = json.loads(capsys.readouterr().out)["items"]
    assert (listed["expires_at"], listed["state"]) == ("9999-12-31T23:59:59+00:00", "holds")


def test_the_database_that_it_holds_for_is_named(db, capsys):
    for new in (True, False):
        assert called(token, "create", "ci", "--db", db) == cli.OK
        said = capsys.readouterr().err
        assert f"it holds for servers on {db}" in said
        assert ("which no server has used yet" in said) == new


def test_a_token_that_is_not_there(db, capsys):
    assert called(token, "revoke", "nobody", "--db", db) == cli.FAILED
    assert "rankscope token list" in capsys.readouterr().err


def test_a_database_that_cannot_be_used(tmp_path, capsys):
    where = f"sqlite:///{tmp_path / 'missing' / 'test.db'}"
    assert called(token, "list", "--db", where) == cli.USAGE
    assert "there is no folder" in capsys.readouterr().err


def test_serve_listens_to_others_only_when_it_knows_them(db, tmp_path, capsys, monkeypatch):
    listened = []
    monkeypatch.setattr(cli, "_listen", lambda settings, *rest: listened.append(settings) or cli.OK)
    everywhere = ("--host", "0.0.0.0", "--port", "0", "--db", db)
    assert called(cli.serve, *everywhere) == cli.USAGE
    assert "rankscope token create NAME" in capsys.readouterr().err
    assert called(cli.serve, *everywhere, "--no-authentication") == cli.OK
    assert called(token, "create", "ci", "--db", db) == cli.OK
    assert called(cli.serve, *everywhere) == cli.OK
    assert called(cli.serve, "--port", "0", "--db", db, "--allowed-host", "Gpu.Example") == cli.OK
    assert [settings.hosts for settings in listened] == [None, None, ("gpu.example",)]
    with sqlite3.connect(tmp_path / "test.db") as raw:
        assert raw.execute("SELECT count(*) FROM access_token").fetchone() == (1,)
