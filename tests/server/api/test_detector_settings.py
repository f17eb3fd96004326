"""Settings of the detectors: from a file and by the API, kept with the run they judge."""

import time
from urllib.parse import quote

import numpy as np
import pytest
from sqlalchemy import delete, update

from rankscope.agent import wire
from rankscope.server.app import create_app
from rankscope.server.cli import serve
from rankscope.server.detectors import DETECTORS
from rankscope.server.evaluation.detector_settings import Given, read_file
from rankscope.server.settings import Settings
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import open_engine, writing
from tests.support.runs.scenarios import spikes
from tests.support.servers.serve_app import serve_app

LOSS = spikes(0, at=[250, 251, 252]).series["loss"]
SPIKE = "loss.spike"


def file(tmp_path, text):
    path = tmp_path / "detectors.toml"
    path.write_text(text, encoding="utf-8")
    return path


def trained(client, run, project="vision", config=None):
    """A run with three bad batches at step 250; its verdict once all of it was evaluated."""
    steps = np.arange(LOSS.shape[1])
    for rank, values in enumerate(LOSS):
        batch = wire.Batch(
            run=run,
            project=project,
            rank=rank,
            seq=0,
            session=f"s{rank}",
            world_size=len(LOSS),
            through_step=int(steps[-1]),
            state="finished",
            hello=wire.Hello(started_at=0.0, config=config or {}),
            columns={"loss": wire.Column(steps, values)},
        )
        sent = client.post(
            "/api/v1/ingest",
            content=wire.encode(batch),
            headers={"Content-Type": wire.CONTENT_TYPE},
        )
        assert sent.status_code == 200, sent.text
    return verdict(client, run)


def verdict(client, run):
    deadline = time.monotonic() + 30
    while True:
        found = get(client, f"/runs/{run}")
        if found["evaluated_step"] == LOSS.shape[1] - 1:
            answer = get(client, f"/runs/{run}/verdict")
            if not any("not been evaluated" in reason for reason in answer["reasons"]):
                return answer
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


def get(client, path):
    answer = client.get(f"/api/v1{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def line(verdict, name):
    [found] = [check for check in verdict["checks"] if check["name"] == name]
    return found


def kinds(client, run):
    return {alert["kind"] for alert in get(client, f"/runs/{run}/alerts")["items"]}


def test_detectors_are_listed_with_what_can_be_set_of_them(client):
    there = get(client, "/detectors")
    assert len(there["items"]) == len(DETECTORS)
    [spike] = [item for item in there["items"] if item["kinds"] == [SPIKE]]
    assert spike["origin"] == "rankscope"
    assert spike["summary"].startswith("The mean loss over the ranks jumps")
    assert spike["thresholds"][0] == {
        "name": "min_z",
        "default": 8.0,
        "unit": "standard deviations",
        "meaning": "robust z on the logarithm from which a value is a spike",
        "least": 0.0,
        "most": "Infinity",
    }
    assert {p["name"] for p in there["profiles"]} == set(wire.PROFILES)
    assert there["failures"] == {}


def test_a_project_sets_changes_and_takes_back(client):
    path = "/api/v1/projects/vision/detectors"
    before = client.get(path).json()
    assert before["overrides"] == {"detectors": {}}
    assert before["detectors"][SPIKE]["enabled"] is True
    assert before["detectors"][SPIKE]["min_z"] == 8.0
    put = client.put(
        path,
        json={"profile": "contrastive", "detectors": {SPIKE: {"min_z": 9}, "lr.too_low": False}},
    )
    assert put.status_code == 200, put.text
    now = put.json()
    assert now["profile"] == "contrastive"
    assert now["detectors"][SPIKE]["min_z"] == 9.0
    assert now["detectors"]["lr.too_low"]["enabled"] is False
    assert now["sources"] == {
        SPIKE: {"min_z": "set for the project"},
        "lr.too_low": {"enabled": "set for the project"},
    }
    patched = client.patch(
        path, json={"profile": None, "detectors": {SPIKE: {"min_z": None, "calm": 20}}}
    ).json()
    assert patched["profile"] is None
    assert patched["overrides"]["detectors"] == {
        SPIKE: {"calm": 20},
        "lr.too_low": {"enabled": False},
    }
    assert client.get(path).json() == patched
    assert get(client, "/projects/other/detectors")["overrides"] == {"detectors": {}}
    assert client.put(path, json={}).json()["detectors"] == before["detectors"]


@pytest.mark.parametrize("project", ["a/b", "ä b%", "detectors"])
def test_projects_have_all_sorts_of_names(client, project):
    path = f"/api/v1/projects/{quote(project, safe='')}/detectors"
    assert client.put(path, json={"detectors": {SPIKE: False}}).json()["project"] == project
    assert client.get(path).json()["overrides"]["detectors"] == {SPIKE: {"enabled": False}}


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        ({"detectors": {"loss.spik": False}}, "did you mean loss.spike?"),
        ({"detectors": {SPIKE: {"z": 1}}}, "there are min_z, min_ratio,"),
        ({"detectors": {SPIKE: {"min_z": "high"}}}, "min_z must be a number, not 'high'"),
        ({"profile": "gan"}, "none of descent, adversarial, reinforcement,"),
        ({"detector": {}}, "detector"),
    ],
)
def test_what_is_wrong_is_a_problem_and_changes_nothing(client, body, reported):
    path = "/api/v1/projects/vision/detectors"
    client.put(path, json={"detectors": {SPIKE: {"min_z": 9}}})
    for answer in (client.put(path, json=body), client.patch(path, json=body)):
        assert answer.status_code == 422
        assert answer.headers["content-type"].startswith("application/problem+json")
        assert reported in answer.json()["detail"]
    assert client.get(path).json()["overrides"] == {"detectors": {SPIKE: {"min_z": 9.0}}}


def test_a_run_is_judged_by_its_project_s_settings_and_the_verdict_shows_them(client):
    plain = trained(client, "plain", project="other")
    assert plain["settings"] == {"profile": None, "off": [], "thresholds": {}}
    assert SPIKE in kinds(client, "plain")
    client.put("/api/v1/projects/vision/detectors", json={"detectors": {SPIKE: {"min_ratio": 500}}})
    deaf = trained(client, "deaf")
    assert SPIKE not in kinds(client, "deaf")
    assert deaf["settings"]["thresholds"] == {SPIKE: {"min_ratio": 500.0}}
    assert line(deaf, SPIKE)["state"] == "passed"
    client.put("/api/v1/projects/vision/detectors", json={"detectors": {SPIKE: False}})
    off = trained(client, "off", config={"profile": "surrogate"})
    assert off["settings"] == {"profile": "surrogate", "off": [SPIKE], "thresholds": {}}
    assert line(off, SPIKE)["state"] == "not_run"
    assert "switched off" in line(off, SPIKE)["why"]
    assert line(off, "loss.plateau")["state"] == "not_run"
    assert "Profile surrogate" in line(off, "loss.plateau")["why"]
    # What holds for a run is its own, whatever is set later.
    assert get(client, "/runs/deaf/detectors")["detectors"][SPIKE]["min_ratio"] == 500.0
    assert get(client, "/runs/off/detectors")["profile"] == "surrogate"


def test_a_run_that_is_evaluated_again_is_judged_as_before(database_url, tmp_path):
    given = read_file(file(tmp_path, '[detectors."loss.spike"]\nmin_ratio = 500\n'))
    with serve_app(create_app(Settings(database=database_url, detectors=given))) as client:
        first = trained(client, "otter")
        assert SPIKE not in kinds(client, "otter")
    # Another file, and everything from the first step on: the code is said to be another one.
    loud = read_file(file(tmp_path, '[detectors."loss.spike"]\nmin_z = 1\n'))
    forget_snapshots(database_url)
    with serve_app(create_app(Settings(database=database_url, detectors=loud))) as client:
        assert verdict(client, "otter") == first
        assert SPIKE not in kinds(client, "otter")
        assert trained(client, "heron")["settings"]["thresholds"] == {SPIKE: {"min_z": 1.0}}
        assert SPIKE in kinds(client, "heron")


def forget_snapshots(database_url):
    """As a new version of the server does: all of the run's data are new to it."""
    engine = open_engine(database_url)
    with writing(engine) as connection:
        connection.execute(delete(schema.snapshot))
        connection.execute(update(schema.run).values(evaluated=0))
    engine.dispose()


def test_the_api_counts_more_than_the_file_and_the_project_more_than_all(tmp_path, database_url):
    given = read_file(
        file(
            tmp_path,
            """
            profile = "surrogate"
            [detectors]
            "lr.too_low" = false
            [detectors.loss.spike]
            min_z = 9
            calm = 20
            [projects.vision.detectors."loss.spike"]
            min_z = 10
            evidence = 40
            """,
        )
    )
    with serve_app(create_app(Settings(database=database_url, detectors=given))) as client:
        client.put("/api/v1/projects/vision/detectors", json={"detectors": {SPIKE: {"calm": 30}}})
        vision, other = (
            get(client, f"/projects/{project}/detectors") for project in ("vision", "other")
        )
    values = vision["detectors"][SPIKE]
    assert (values["min_z"], values["calm"], values["evidence"]) == (10.0, 30, 40)
    assert vision["sources"][SPIKE] == {
        "min_z": "the server's file, for vision",
        "evidence": "the server's file, for vision",
        "calm": "set for the project",
    }
    assert vision["profile"] == "surrogate"
    assert vision["detectors"]["lr.too_low"]["enabled"] is False
    assert other["detectors"][SPIKE]["min_z"] == 9.0


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("[detectors", "is no TOML"),
        ('[detectors."loss.spike"]\nmin_zz = 1\n', "min_zz is no threshold of it; there are min_z"),
        ("[projects.a]\nprofile = 'gan'\n", "projects.a: profile 'gan' is none of descent"),
        ("[detector]\nx = 1\n", "'detector' is none of profile, detectors"),
        ("projects = 3\n", "projects must be a map"),
    ],
)
def test_a_server_does_not_start_on_a_wrong_file(tmp_path, capsys, text, reported):
    path = file(tmp_path, text)
    arguments = ["--db", f"sqlite:///{tmp_path / 'a.db'}", "--detectors", str(path), "--port", "0"]
    assert serve(arguments) == 2
    written = capsys.readouterr().err
    assert str(path) in written
    assert reported in written


def test_a_file_that_is_not_there_is_reported(tmp_path, capsys):
    assert serve(["--detectors", str(tmp_path / "none.toml"), "--port", "0"]) == 2
    assert "none.toml" in capsys.readouterr().err


def test_without_a_file_nothing_is_set():
    assert Given().layers("vision") == (Given().general,)
