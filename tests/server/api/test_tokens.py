"""Who gets in: tokens, their scopes and projects, other sites' pages, other names."""

import time
from types import SimpleNamespace

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from rankscope.agent import wire
from rankscope.server.api import guard, stream
from rankscope.server.app import create_app
from rankscope.server.commands import lists
from rankscope.server.commands.client import OK, USAGE
from rankscope.server.gate.gate import gate
from rankscope.server.settings import Settings
from rankscope.server.storage.access import tokens
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine, reading, writing
from tests.support.servers.api import (
    MSGPACK,
    batch,
    check_problem,
    column,
    desynced,
    evaluated,
    get,
)
from tests.support.servers.serve_app import serve_app

# Whoever may reach the server may ask for these.
OPEN = {"/healthz", "/readyz", "/openapi.json", "/docs", "/login", "/logout"}


def make(engine, name, *scopes, projects=None, lasts=None):
    now = time.time()
    with writing(engine) as connection:
        made, secret = tokens.create(
            connection,
            name=name,
            scopes=scopes,
            projects=projects,
            now=now,
            expires_at=None if lasts is None else now + lasts,
        )
    return made, secret


def bearer(secret):
    return {"Authorization": f"Bearer {secret}"}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A server with tokens of all kinds, and a run in each of two projects, one of them wrong."""
    url = f"sqlite:///{tmp_path_factory.mktemp('tokens') / 'test.db'}"
    engine = open_engine(url)
    migrate.upgrade(engine)
    app = create_app(Settings(database=url))
    with serve_app(app) as client:
        desynced(client)
        evaluated(client)
    made = {
        "read": ("read",),
        "write": ("write",),
        "admin": ("admin",),
    }
    secrets = {name: make(engine, name, *scopes)[1] for name, scopes in made.items()}
    secrets["beta"] = make(engine, "beta", "read", "write", "admin", projects=["beta"])[1]
    secrets["expired"] = make(engine, "expired", "admin", lasts=-1.0)[1]
    gone, secrets["revoked"] = make(engine, "revoked", "admin")
    with writing(engine) as connection:
        assert tokens.revoke(connection, gone.id, now=time.time()).revoked_at is not None
    app = create_app(Settings(database=url))
    with serve_app(app) as client:
        sent = batch(run="badger", project="beta", columns={"loss": column([0, 1], [2.0, 1.0])})
        answer = client.post(
            "/api/v1/ingest",
            content=wire.encode(sent),
            headers=MSGPACK | bearer(secrets["beta"]),
        )
        assert answer.status_code == 200, answer.text
        yield SimpleNamespace(client=client, app=app, engine=engine, secrets=secrets, url=url)
    engine.dispose()


def routes(app):
    """All of the interface, and the pages, as (method, path) with a run and an alert that exist."""
    found = {
        (method.upper(), path)
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    pages = [
        "/",
        "/alerts",
        "/notifications",
        "/compare",
        "/runs/{run}",
        "/compare/figures/curves.json",
    ]
    figures = ["curves", "divergence", "distances", "data-ranks", "data-steps", "overlap"]
    pages += [f"/runs/{{run}}/figures/{name}.json" for name in figures]
    found |= {("GET", path) for path in pages}
    return sorted(found)


def ask(service, method, path, secret=None, run="otter", **more):
    filled = path.replace("{run}", run).replace("{project}", "default")
    for name in ("alert", "silence"):
        filled = filled.replace(f"{{{name}}}", "no-such-id")
    headers = {} if secret is None else bearer(service.secrets[secret])
    try:
        with service.client.stream(method, filled, headers=headers, **more) as answer:
            return answer.status_code
    except httpx.ReadTimeout:
        return 200  # a stream


DELETION = ("DELETE", "/api/v1/runs/{run}")


def needs(method, path):
    if path in OPEN:
        return None
    if method in ("GET", "HEAD"):
        return "admin" if path == "/api/v1/audit" else "read"
    return "write" if path == "/api/v1/ingest" else "admin"


def test_every_route_asks_for_a_token_of_its_scope(service):
    asked = routes(service.app)
    assert len(asked) > 30
    for method, path in asked:
        scope = needs(method, path)
        where = f"{method} {path}"
        # Whoever may would delete what is asked for below.
        run = "no-such-run" if (method, path) == DELETION else "otter"
        if scope is None:
            assert ask(service, method, path) not in (401, 403), where
            continue
        for nobody in (None, "expired", "revoked"):
            assert ask(service, method, path, nobody) == 401, where
        for holder in ("read", "write", "admin"):
            refused = holder not in (scope, "admin")
            status = ask(service, method, path, holder, run)
            assert (status == 403) == refused, (where, holder, status)
            assert status != 401, (where, holder)


def test_a_token_of_a_project_sees_no_other(service):
    for method, path in routes(service.app):
        if "{run}" not in path or path.startswith("/api/v1/ingest"):
            continue
        body = {"kind": "loss.spike"} if path.endswith("silences") and method == "POST" else None
        body = {"add": ["nightly"]} if path.endswith("tags") else body
        query = {"metric": "loss"} if path.endswith(("series", "curves.json")) else None
        status = ask(service, method, path, "beta", json=body, params=query)
        assert status == 404, (method, path, status)
    assert ask(service, "GET", "/api/v1/projects/{project}/detectors", "beta") == 404
    assert ask(service, "PUT", "/api/v1/projects/{project}/detectors", "beta", json={}) == 404
    for of_all in ("/metrics", "/api/v1/audit"):
        assert ask(service, "GET", of_all, "beta") == 403
    pairs = {"runs": ["badger", "otter"]}
    assert ask(service, "GET", "/api/v1/compare", "beta", params=pairs) == 404
    mine = bearer(service.secrets["beta"])

    def listed(path, **params):
        answer = service.client.get(f"/api/v1{path}", params=params, headers=mine)
        return [item["id"] for item in answer.json()["items"]]

    projects = service.client.get("/api/v1/projects", headers=mine).json()["items"]
    assert projects == [{"name": "beta", "runs": 1}]
    assert listed("/runs") == ["badger"]
    assert listed("/runs", project="default") == []
    assert listed("/alerts", consequences="true") == []
    assert ask(service, "GET", "/api/v1/runs/{run}", "beta", run="badger") == 200


def test_alerts_and_silences_of_other_projects_are_not_there(service):
    all_of_it = bearer(service.secrets["admin"])
    client = service.client
    [alert] = client.get("/api/v1/alerts", headers=all_of_it).json()["items"]
    silence = client.post(
        "/api/v1/runs/otter/silences", json={"kind": "loss.spike"}, headers=all_of_it
    ).json()
    mine = bearer(service.secrets["beta"])
    for method, path in (
        ("GET", f"/api/v1/alerts/{alert['id']}"),
        ("POST", f"/api/v1/alerts/{alert['id']}/acknowledge"),
        ("DELETE", f"/api/v1/alerts/{alert['id']}/acknowledge"),
        ("DELETE", f"/api/v1/silences/{silence['id']}"),
    ):
        check_problem(client.request(method, path, headers=mine), 404)
    [still] = client.get("/api/v1/runs/otter/silences", headers=all_of_it).json()["items"]
    assert still["id"] == silence["id"]
    assert client.delete(f"/api/v1/silences/{silence['id']}", headers=all_of_it).status_code == 204


@pytest.mark.parametrize(
    "sent", [batch(3, run="otter", project="beta"), batch(run="stoat", project="gamma")]
)
def test_a_token_of_a_project_writes_to_no_other(service, sent):
    answer = service.client.post(
        "/api/v1/ingest",
        content=wire.encode(sent),
        headers=MSGPACK | bearer(service.secrets["beta"]),
    )
    assert "bound to beta" in check_problem(answer, 403)["detail"]


def test_a_run_of_another_project_has_no_say_in_a_verdict(service):
    hello = {
        "host": "h",
        "pid": 1,
        "local_rank": 0,
        "started_at": time.time(),
        "config": {"first_run": "newt"},
    }

    def post(run, secret, **more):
        sent = {"v": 1, "run": run, "rank": 0, "session": "s", "seq": 0, "world_size": 1}
        sent |= {"sent_at": time.time(), "through_step": 0, **more}
        answer = service.client.post(
            "/api/v1/ingest", json=sent, headers=bearer(service.secrets[secret])
        )
        assert answer.status_code == 200, answer.text

    failed = {"state": "failed", "error": "boom", "hello": hello}
    post("newt", "write", project="default", state="finished")
    post("newt.2", "beta", project="beta", **failed)

    def verdict():
        headers = bearer(service.secrets["admin"])
        return service.client.get("/api/v1/runs/newt/verdict", headers=headers).text

    assert "newt.2" not in verdict()
    assert "boom" not in verdict()


def test_a_name_taken_by_another_project_gets_none_of_its_data(service):
    def post(secret, **fields):
        sent = wire.encode(batch(run="weasel", **fields))
        headers = MSGPACK | bearer(service.secrets[secret])
        return service.client.post("/api/v1/ingest", content=sent, headers=headers)

    assert post("beta", project="beta").status_code == 200
    refused = check_problem(post("write", rank=1, project="alpha"), 403)
    assert "'weasel' of project 'alpha'" in refused["detail"]
    assert post("write", rank=2, project="beta").status_code == 200
    assert post("write", rank=3).status_code == 200  # names none


def test_refusals_say_what_to_do(service):
    client = service.client
    nothing = client.get("/api/v1/runs")
    assert "rankscope token create" in check_problem(nothing, 401)["detail"]
    assert nothing.headers["www-authenticate"] == "Bearer"
    assert "default-src 'self'" in nothing.headers["content-security-policy"]
    wrong = client.get("/api/v1/runs", headers=bearer("rankscope_guess"))
    assert "not known" in check_problem(wrong, 401)["detail"]
    less = client.post("/api/v1/alerts/x/acknowledge", headers=bearer(service.secrets["read"]))
    assert "'read' may read" in check_problem(less, 403)["detail"]


def test_commands_say_what_to_do_and_end_as_the_gate_does(service, capsys):
    where = ("--server", str(service.client.base_url))
    for command, run in ((lists.runs, []), (lists.alerts, ["otter"]), (gate, ["otter"])):
        assert command([*run, *where]) == USAGE
        assert "set RANKSCOPE_TOKEN" in capsys.readouterr().err
    assert lists.runs([*where, "--token", service.secrets["read"]]) == OK
    assert "otter" in capsys.readouterr().out


def test_the_database_does_not_have_the_secrets(service):
    with reading(service.engine) as connection:
        rows = connection.exec_driver_sql("SELECT * FROM access_token").all()
    stored = repr(rows)
    assert len(rows) == len(service.secrets)
    assert not any(secret in stored for secret in service.secrets.values())


def test_a_browser_logs_in_and_out(service):
    page = {"Accept": "text/html"}
    with httpx.Client(base_url=service.client.base_url) as browser:
        away = browser.get("/runs/otter?step=3", headers=page)
        assert (away.status_code, away.headers["location"]) == (
            303,
            "/login?next=%2Fruns%2Fotter%3Fstep%3D3",
        )
        form = browser.get(away.headers["location"], headers=page)
        assert 'value="/runs/otter?step=3"' in form.text
        guessed = browser.post("/login", data={"token": "guess", "next": "/alerts"})
        assert guessed.headers["location"] == "/login?wrong=1&next=%2Falerts"
        assert "not known here" in browser.get(guessed.headers["location"], headers=page).text
        inside = browser.post("/login", data={"token": service.secrets["read"], "next": "/alerts"})
        assert (inside.status_code, inside.headers["location"]) == (303, "/alerts")
        cookie = inside.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=lax" in cookie
        assert "Log out" in browser.get("/alerts", headers=page).text
        assert browser.get("/api/v1/runs").status_code == 200
        out = browser.post("/logout")
        assert out.headers["location"] == "/login"
        assert browser.get("/api/v1/runs").status_code == 401


@pytest.mark.parametrize("there", ["https://evil.example", "//evil.example", "/\\evil.example"])
def test_logging_in_leads_to_no_other_site(service, there):
    form = {"token": service.secrets["read"], "next": there}
    assert service.client.post("/login", data=form).headers["location"] == "/"
    service.client.cookies.clear()


def test_a_token_that_is_revoked_ends_at_once(service, monkeypatch):
    monkeypatch.setattr(guard, "_FRESH_SECONDS", 0.0)
    made, secret = make(service.engine, "short", "read")
    assert service.client.get("/api/v1/runs", headers=bearer(secret)).status_code == 200
    with writing(service.engine) as connection:
        tokens.revoke(connection, made.id, now=time.time())
    assert service.client.get("/api/v1/runs", headers=bearer(secret)).status_code == 401


def test_an_open_stream_ends_with_its_token(service, monkeypatch):
    monkeypatch.setattr(guard, "_FRESH_SECONDS", 0.0)
    monkeypatch.setattr(stream, "_RECHECK_SECONDS", 0.1)
    made, secret = make(service.engine, "watcher", "read")
    path = "/api/v1/runs/otter/stream"
    with service.client.stream("GET", path, headers=bearer(secret), timeout=5.0) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: state"
        with writing(service.engine) as connection:
            tokens.revoke(connection, made.id, now=time.time())
        list(lines)  # ends: else nothing comes until the time is over


def test_a_new_token_is_known_within_a_second(service, monkeypatch):
    monkeypatch.setattr(guard, "_FRESH_SECONDS", 1000.0)
    _, secret = make(service.engine, "new", "read")
    time.sleep(guard._UNKNOWN_SECONDS)
    assert service.client.get("/api/v1/runs", headers=bearer(secret)).status_code == 200


@pytest.mark.parametrize("odd", ['foo={"a":1}', "x[y]=1", "foo=a b", '_ga=GA1.1; t="x', "session"])
def test_odd_cookies_of_others_lock_nobody_out(service, odd):
    cookie = f"{odd}; {guard.COOKIE}={service.secrets['read']}"
    assert service.client.get("/api/v1/runs", headers={"Cookie": cookie}).status_code == 200


def test_a_database_that_does_not_answer_says_when_to_ask_again(client, app, monkeypatch):
    def fails():
        raise OperationalError("SELECT", {}, Exception("gone"))

    monkeypatch.setattr(app.state.guard, "_tokens", None)
    monkeypatch.setattr(app.state.guard, "_read", fails)
    answer = client.get("/api/v1/runs")
    check_problem(answer, 503)
    assert int(answer.headers["retry-after"]) > 0


def test_a_server_about_to_end_says_when_to_send_again(client, app):
    app.state.writer.stop()
    answer = client.post("/api/v1/ingest", content=wire.encode(batch()), headers=MSGPACK)
    check_problem(answer, 503)
    assert int(answer.headers["retry-after"]) > 0


# ---------------------------------------------------------------------------------- without tokens


def test_without_tokens_everybody_gets_in_and_revoking_the_last_opens_nothing(
    client, app, monkeypatch
):
    monkeypatch.setattr(guard, "_FRESH_SECONDS", 0.0)
    assert get(client, "/runs")["items"] == []
    made, _ = make(app.state.engine, "first", "read")
    check_problem(client.get("/api/v1/runs"), 401)
    with writing(app.state.engine) as connection:
        tokens.revoke(connection, made.id, now=time.time())
    check_problem(client.get("/api/v1/runs"), 401)


@pytest.mark.parametrize(
    ("headers", "taken"),
    [
        ({}, True),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://["}, False),
        ({"Origin": "own"}, True),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "own"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        # Behind a proxy that gives the host another name.
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://rankscope.example"}, True),
    ],
)
def test_pages_of_other_sites_change_nothing(tmp_path, headers, taken):
    app = create_app(Settings(database=f"sqlite:///{tmp_path / 'test.db'}", evaluate=False))
    with serve_app(app) as client:
        own = str(client.base_url).rstrip("/")
        sent = {name: value.replace("own", own) for name, value in headers.items()}
        answer = client.post("/api/v1/ingest", content=wire.encode(batch()), headers=MSGPACK | sent)
        if taken:
            assert answer.status_code == 200, answer.text
        else:
            assert "may not change" in check_problem(answer, 403)["detail"]
        assert client.get("/api/v1/runs", headers=sent).status_code == 200


def test_a_server_of_its_own_machine_answers_to_its_names(tmp_path):
    given = Settings(
        database=f"sqlite:///{tmp_path / 'test.db'}", evaluate=False, hosts=("gpu.example",)
    )
    with serve_app(create_app(given)) as client:
        for host in ("localhost:8642", "127.0.0.1", "[::1]:80", "app.localhost", "GPU.example:1"):
            assert client.get("/healthz", headers={"Host": host}).status_code == 200, host
        for host in ("evil.example", "gpu.example.evil.example:8642", "localhost.evil.example"):
            answer = client.get("/api/v1/runs", headers={"Host": host})
            assert "--allowed-host" in check_problem(answer, 421)["detail"]
