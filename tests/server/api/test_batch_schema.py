"""The JSON Schema of a batch and the server agree; `curl` with the documented JSON is judged."""

import copy
import json
import subprocess
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings

from rankscope.agent import wire
from rankscope.server.api import batch_schema
from rankscope.server.gate.gate import gate
from tests.support.batches import batches
from tests.support.doc_blocks import blocks
from tests.support.runs.fixture_run import SyntheticRun
from tests.support.servers.service import Service

DOCS = Path(__file__).parents[3] / "docs"
VALIDATOR = jsonschema.Draft202012Validator(batch_schema.SCHEMA)

TABLE = {"names": ["a", "b"], "shapes": [[2, 2], [3]], "dtypes": ["float32", "float32"]}
WHOLE = {
    "run": "otter",
    "rank": 0,
    "seq": 0,
    "hello": {"host": "node-1", "tables": {"parameters": TABLE}, "config": {"lr": 0.1}},
    "columns": {
        "loss": {"steps": [0, 1, 2], "values": [1, 0.5, "NaN"]},
        "lr": {"steps": {"range": [0, 6, 2]}, "values": [0.1, "Infinity", "-Infinity"]},
    },
    "words": {"parameters": {"steps": [0, 1], "values": ["00ff", 2**64 - 1]}},
    "rows": [[3, {"grad_norm": 1.5}]],
    "word_rows": [[3, {"batch": "ffffffffffffffff"}]],
    "prints": [
        {"step": 0, "stage": "parameters", "digests": ["1", "2"], "sketches": [[1, "NaN"], [0, 1]]}
    ],
    "layers": [{"step": 0, "metric": "grad_norm", "values": [1, "NaN"]}],
    "events": [{"kind": "mark", "text": "a new phase", "data": {"a": [1, None]}}],
    "dropped": {"queue": 3},
    "state": "finished",
    "something_newer": 1,
}


def taken(batch):
    """Whether the server takes a batch, by the very functions that read it."""
    try:
        wire.decode_json(json.dumps(batch).encode())
    except wire.WireError:
        return False
    return True


def changed(path, value):
    """A whole batch with another value at a place, or without it."""
    made = copy.deepcopy(WHOLE)
    *way, last = path
    at = made
    for key in way:
        at = at[key]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return made


def assert_described(batch):
    """What the schema has against it, if anything."""
    assert [error.message for error in VALIDATOR.iter_errors(batch)] == []


def test_it_is_a_schema():
    schemas = jsonschema.Draft202012Validator(jsonschema.Draft202012Validator.META_SCHEMA)
    assert [error.message for error in schemas.iter_errors(batch_schema.document())] == []


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(batches)
def test_whatever_an_agent_sends_is_described(sent):
    plain = json.loads(json.dumps(wire.to_json(sent), allow_nan=False))
    # These names are drawn from what the wire takes; some are none of a run.
    plain["run"], plain["project"] = "otter", "default"
    assert_described(plain)


def test_a_run_s_own_batches_are_described():
    run = SyntheticRun(run="otter", ranks=2, steps=40, desync=(1, 20), told=True)
    for rank in range(2):
        for batch in run.batches(rank):
            assert_described(json.loads(json.dumps(wire.to_json(batch), allow_nan=False)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("hello",), None),
        (("hello",), ...),
        (("columns",), None),
        (("rows",), None),
        (("attempt",), None),
        (("attempt",), 2),
        (("prints", 0, "sketches"), None),
        (("prints", 0, "step"), -1),
        (("events", 0, "data"), None),
        (("hello", "tables", "parameters", "shards"), ["", "own@1"]),
        (("hello", "heartbeat_seconds"), 0.5),
        (("v",), 1),
        (("through_step",), -1),
        (("run",), "a run (2) of ü"),
        (("columns", "loss", "unit"), "nats"),
    ],
)
def test_what_is_right_is_right_to_both(path, value):
    made = changed(path, value)
    assert VALIDATOR.is_valid(made), list(VALIDATOR.iter_errors(made))
    assert taken(made)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("run",), ...),
        (("rank",), ...),
        (("seq",), ...),
        (("run",), ""),
        (("run",), 7),
        (("run",), "x" * 251),
        (("run",), "a\nb"),
        (("rank",), -1),
        (("rank",), "0"),
        (("rank",), True),
        (("rank",), 2**20),
        (("world_size",), 0),
        (("v",), wire.VERSION + 1),
        (("state",), "done"),
        (("session",), "x" * 65),
        (("through_step",), -2),
        (("through_step",), None),
        (("project",), None),
        (("sent_at",), "now"),
        (("hello",), []),
        (("hello", "host"), 1),
        (("hello", "heartbeat_seconds"), -1),
        (("hello", "tables", "parameters", "names"), [1, 2]),
        (("hello", "tables", "parameters", "shapes"), [[-1], [1]]),
        (("columns",), []),
        (("columns", "loss"), [1, 2, 3]),
        (("columns", "loss", "values"), ...),
        (("columns", "loss", "steps"), ...),
        (("columns", "loss", "steps"), [0, 1, -2]),
        (("columns", "loss", "steps"), [0, 1, 1.5]),
        (("columns", "loss", "values"), [1, 0.5, "nan"]),
        (("columns", "loss", "values"), [1, 0.5, None]),
        (("columns", "loss", "values"), [1, 0.5, True]),
        (("columns", "lr", "steps"), {"range": [0, 6]}),
        (("columns", ""), {"steps": [], "values": []}),
        (("words", "parameters", "values"), ["0", "xyz"]),
        (("words", "parameters", "values"), ["0", "1" + "0" * 16]),
        (("words", "parameters", "values"), [0, -1]),
        (("words", "parameters", "values"), [0, 0.5]),
        (("rows", 0), [3]),
        (("rows", 0), [3, {"a": "b"}]),
        (("word_rows", 0), [-1, {}]),
        (("prints", 0, "stage"), "afterwards"),
        (("prints", 0, "digests"), ...),
        (("prints", 0, "step"), ...),
        (("layers", 0, "metric"), ...),
        (("layers", 0, "values"), "many"),
        (("layers", 0, "step"), -1),
        (("events", 0, "kind"), ...),
        (("events", 0, "text"), None),
        (("dropped", "queue"), 1.5),
        (("dropped", "queue"), -1),
    ],
)
def test_what_is_wrong_is_wrong_to_both(path, value):
    assert VALIDATOR.is_valid(WHOLE)
    assert taken(WHOLE)
    made = changed(path, value)
    assert not VALIDATOR.is_valid(made)
    assert not taken(made)


@pytest.mark.parametrize("run", ["a/b", "a\\b", ".", "..", " a", "a "])
def test_names_that_addresses_cannot_have(client, run):
    made = changed(("run",), run)
    assert not VALIDATOR.is_valid(made)
    assert client.post("/api/v1/ingest", json=made).status_code == 422


def test_the_interface_s_description_has_it(client):
    described = client.get("/openapi.json").json()
    body = described["paths"]["/api/v1/ingest"]["post"]["requestBody"]["content"]
    assert body["application/json"]["schema"] == {"$ref": "#/components/schemas/Batch"}
    published = json.loads((DOCS / "batch.schema.json").read_text(encoding="utf-8"))
    assert described["components"]["schemas"]["Batch"].items() <= published.items()


@pytest.mark.e2e
def test_curl_with_the_documented_json_gets_a_run_judged(tmp_path, capsys):
    page = blocks((DOCS / "ingest.md").read_text(encoding="utf-8"))
    [example] = [b for b in page if b.title == "batch.json"]
    VALIDATOR.validate(json.loads(example.text))
    (tmp_path / "batch.json").write_text(example.text, encoding="utf-8")
    posts = next(b for b in page if "@batch.json" in b.text)
    with Service(tmp_path / "server") as server:
        command = posts.text.replace("http://127.0.0.1:8642", server.url)
        for duplicate in (False, True):
            posted = subprocess.run(
                ["bash", "-euc", command],
                cwd=tmp_path,
                check=True,
                capture_output=True,
                text=True,
                timeout=60,
            )
            answer = json.loads(posted.stdout)
            assert (answer["accepted"] > 0, answer["duplicate"]) == (not duplicate, duplicate)
        run = json.loads(example.text)["run"]
        assert gate([run, "--server", server.url, "--wait", "60", "--format", "json"]) == 1
        report = json.loads(capsys.readouterr().out)
        [alert] = server.alerts(run)
    assert (report["verdict"], alert["kind"], alert["first_step"]) == ("fail", "loss.nonfinite", 3)
