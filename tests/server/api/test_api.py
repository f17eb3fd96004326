"""The REST interface on a real application with its worker running."""

import gzip
import json
import math
import time
from datetime import datetime

import numpy as np

from rankscope.agent import wire
from tests.support.servers.api import MSGPACK, batch, check_problem, column, evaluated, get, post


def test_points_posted_are_points_read(client):
    values = [1.0, math.nan, math.inf, -math.inf]
    sent = batch(columns={"loss": column(range(4), values)}, world_size=1)
    assert post(client, sent).json() == {
        "accepted": 4,
        "duplicate": False,
        "dense_until": None,
        "hello_wanted": False,
    }
    assert post(client, sent).json()["duplicate"] is True
    [series] = get(client, "/runs/otter/series", metric="loss")["series"]
    assert series["steps"] == [0, 1, 2, 3]
    assert series["values"] == [1.0, "NaN", "Infinity", "-Infinity"]
    assert series["min"] == series["max"] == series["values"]


def test_json_and_gzip_are_taken_too(client):
    first = batch(columns={"loss": column([0], [math.nan])})
    answer = client.post("/api/v1/ingest", json=wire.to_json(first))
    assert answer.json()["accepted"] == 1
    second = batch(seq=1, columns={"loss": column([1], [2.0])})
    packed = gzip.compress(wire.encode(second))
    answer = client.post(
        "/api/v1/ingest", content=packed, headers=MSGPACK | {"Content-Encoding": "gzip"}
    )
    assert answer.json()["accepted"] == 1
    [series] = get(client, "/runs/otter/series", metric="loss")["series"]
    assert series["values"] == ["NaN", 2.0]


def test_a_rank_can_be_chosen_and_spikes_survive_buckets(client):
    spiky = np.ones(1000)
    spiky[613] = 99.0
    for rank in range(3):
        post(client, batch(rank, columns={"loss": column(range(1000), spiky + rank)}))
    answer = get(client, "/runs/otter/series", metric="loss", rank=[0, 2], max_points=50)
    assert [s["rank"] for s in answer["series"]] == [0, 2]
    assert len(answer["series"][0]["steps"]) == 50
    assert max(answer["series"][0]["max"]) == 99.0


def test_the_run_says_what_the_contract_promises(client):
    post(client, batch(world_size=2, columns={"loss": column([0, 1], [1.0, 2.0])}, through_step=1))
    run = get(client, "/runs/otter")
    promised = (
        "id project name state world_size ranks started_at last_seen_at last_step config verdict"
    )
    assert set(promised.split()) <= set(run)
    assert (run["state"], run["world_size"], run["ranks"], run["last_step"]) == (
        "running",
        2,
        [0],
        1,
    )
    assert run["started_at"] == "1970-01-01T00:16:40Z"
    [listed] = get(client, "/runs")["items"]
    assert set(promised.split()) <= set(listed)


def test_numbers_of_tensors_are_series_of_their_own(client):
    names = ("conv1.weight", "conv1.bias", "fc/0.weight")
    table = wire.TensorTable(names, ((1,),) * 3, ("float32",) * 3, ("",) * 3)
    for rank in range(2):
        made = tuple(
            wire.Layers(
                step=step,
                table="parameters",
                metric="grad_norm",
                values=np.array([rank + step, math.nan, math.inf]),
            )
            for step in (0, 32)
        )
        hello = wire.Hello(started_at=1000.0, tables={"parameters": table})
        sent = batch(rank, hello=hello, layers=made, columns={"grad_norm": column([0], [1.0])})
        assert post(client, sent).json()["accepted"] == 7
    listed = get(client, "/runs/otter/metrics")
    assert [m["name"] for m in listed["items"]] == [
        "grad_norm",
        "grad_norm/conv1.bias",
        "grad_norm/conv1.weight",
        "grad_norm/fc/0.weight",
    ]
    assert listed["items"][1] | {"name": ""} == {
        "name": "",
        "ranks": [0, 1],
        "first_step": 0,
        "last_step": 32,
    }
    short = get(client, "/runs/otter/metrics", tensors=False)
    assert [m["name"] for m in short["items"]] == ["grad_norm"]
    [family] = short["families"]
    assert (family["metric"], family["tensors"]) == ("grad_norm", list(names))
    found = get(client, "/runs/otter/series", metric="grad_norm/conv1.weight", rank=1)["series"]
    assert [(s["rank"], s["steps"], s["values"]) for s in found] == [(1, [0, 32], [1.0, 33.0])]
    found = get(client, "/runs/otter/series", metric="grad_norm/fc/0.weight")["series"]
    assert found[0]["values"] == ["Infinity"] * 2
    seen, cursor = [], None
    while cursor is not None or not seen:
        asked = {"limit": 3, **({"cursor": cursor} if cursor else {})}
        page = get(client, "/runs/otter/metrics", **asked)
        seen += [m["name"] for m in page["items"]]
        cursor = page["next_cursor"]
    assert seen == [m["name"] for m in listed["items"]]
    figure = client.get(
        "/runs/otter/figures/curves.json", params={"metric": "grad_norm/conv1.weight"}
    )
    assert figure.status_code == 200


def test_what_differs_by_design_is_stored_and_no_desync(client):
    names = ["batch", "local_gradient", "rng/torch", "rng/numpy", "rng/python", "rng/cuda"]
    table = wire.TensorTable(("w",), ((1,),), ("float32",), ("",))
    for rank in range(2):
        local = wire.Fingerprint(
            step=4,
            stage="local_gradient",
            table="parameters",
            digests=np.array([rank], np.uint64),
            sketches=np.array([[3.0 * rank, 4.0 * rank]]),
        )
        digests = {name: column(range(8), [rank] * 8, np.uint64) for name in names}
        sent = batch(
            rank,
            world_size=2,
            state="finished",
            through_step=7,
            hello=wire.Hello(started_at=1000.0, tables={"parameters": table}),
            words=digests | {"parameters": column(range(8), [5] * 8, np.uint64)},
            prints=(local,),
        )
        assert post(client, sent).json()["accepted"] == 57
    evaluated(client)
    assert get(client, "/runs/otter/alerts")["items"] == []
    compared = get(client, "/runs/otter/divergence", matrix=True, stage="local_gradient")
    assert compared["items"] == []
    assert compared["matrix"]["distance"] == [[0.0, 5.0], [5.0, 0.0]]
    assert {c["stage"] for c in get(client, "/runs/otter/divergence")["items"]} == {"parameters"}


def test_the_run_says_what_its_agents_do_and_could_not(client):
    def interval(tier, steps):
        return {f"rankscope/interval/{tier}": column([0, 32], steps)}

    def fault(step, text):
        return wire.Event(step=step, kind="agent.fault", text=text)

    assert get_agent(client, batch(world_size=3)) == {
        "sampling": [],
        "dense_until": None,
        "faults": [],
        "dropped": {},
        "late": 0,
        "given_up": 0,
    }
    overhead = {"rankscope/overhead": column([0, 32], [0.5, 0.006])}
    others = interval("word", [2, math.nan]) | {"rankscope/sampled": column([0, 32], [1.0, 0.25])}
    columns = interval("word", [1, 4]) | interval("full", [64, 32]) | overhead
    for rank in (2, 1):
        agent = get_agent(
            client,
            batch(
                rank,
                columns=columns if rank == 1 else others,
                events=(fault(3, "gradients: no room"), wire.Event(step=4, kind="mark")),
                dropped={"memory_full": 5 * rank, "disk_full": 0},
                world_size=3,
            ),
        )
    agent = get_agent(client, batch(1, seq=1, events=(fault(9, "words: never"),)))
    assert agent["sampling"] == [
        {"rank": 1, "overhead": 0.006, "sampled": None, "intervals": {"full": 32, "word": 4}},
        {"rank": 2, "overhead": None, "sampled": 0.25, "intervals": {}},
    ]
    assert [(f["text"], f["ranks"], f["step"]) for f in agent["faults"]] == [
        ("gradients: no room", [1, 2], 3),
        ("words: never", [1], 9),
    ]
    assert agent["dropped"] == {"memory_full": 10}


def get_agent(client, sent):
    assert post(client, sent).status_code == 200
    return get(client, "/runs/otter")["agent"]


def test_what_came_too_late_is_counted(client):
    post(client, batch(columns={"loss": column(range(5), [1.0] * 5)}, through_step=4))
    evaluated(client)
    sent = batch(seq=1, columns={"loss": column([2, 5], [9.0, 1.0])}, through_step=5)
    assert post(client, sent).json()["accepted"] == 2
    assert evaluated(client)["agent"]["late"] == 1


def test_lists_are_paged_by_an_opaque_cursor(client):
    for n in range(7):
        post(client, batch(run=f"run-{n}", project="even" if n % 2 == 0 else "odd"))
    seen, cursor = [], None
    while True:
        page = get(client, "/runs", limit=3, **({"cursor": cursor} if cursor else {}))
        assert len(page["items"]) <= 3
        seen += [run["id"] for run in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert sorted(seen) == [f"run-{n}" for n in range(7)]
    assert len(get(client, "/runs", project="even")["items"]) == 4
    assert [r["id"] for r in get(client, "/runs", q="UN-3")["items"]] == ["run-3"]
    assert get(client, "/runs", q="100%")["items"] == []


def test_the_last_step_there_is_is_one_like_others(client):
    last = wire.limits.STEP.most
    loss = {"steps": [0, last - 1, last], "values": [3.0, 2.0, 1.0]}
    sent = {"run": "otter", "rank": 0, "seq": 0, "through_step": last, "columns": {"loss": loss}}
    assert client.post("/api/v1/ingest", json=sent).status_code == 200
    assert get(client, "/runs/otter")["last_step"] == last
    for points in (2, 600):
        [line] = get(client, "/runs/otter/series", metric="loss", max_points=points)["series"]
        assert (min(line["min"]), max(line["max"])) == (1.0, 3.0)
    [tail] = get(client, "/runs/otter/series", metric="loss", from_step=last)["series"]
    assert (tail["steps"], tail["values"]) == ([last], [1.0])


def test_a_process_that_does_not_say_when_it_began_has_begun_now(client):
    sent = {"run": "otter", "rank": 0, "seq": 0, "hello": {"host": "node0"}}
    before = time.time()
    assert client.post("/api/v1/ingest", json=sent).status_code == 200
    run = get(client, "/runs/otter")
    assert datetime.fromisoformat(run["started_at"]).timestamp() >= before - 1
    # So has the next one, which is no earlier attempt.
    assert client.post("/api/v1/ingest", json=sent | {"session": "b"}).status_code == 200
    [rank] = get(client, "/runs/otter")["rank_status"]
    assert rank["attempt"] == 1


def test_health(client):
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}
    post(client, batch(columns={"loss": column([0], [1.0])}))
    text = client.get("/metrics").text
    assert "rankscope_points_total 1\n" in text
    assert 'rankscope_runs{state="running"} 1\n' in text


def test_nothing_comes_from_outside(client):
    for path in ("/docs", "/", "/alerts", "/notifications"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "http://" not in answer.text.replace(str(client.base_url), "")
        assert "https://" not in answer.text


def test_the_interface_is_the_documented_one(client):
    openapi = client.get("/openapi.json").json()
    routes = {
        (method.upper(), path) for path, methods in openapi["paths"].items() for method in methods
    }
    run = "/api/v1/runs/{run}"
    assert {
        ("POST", "/api/v1/ingest"),
        ("GET", "/api/v1/runs"),
        ("GET", run),
        ("GET", f"{run}/metrics"),
        ("GET", f"{run}/series"),
        ("GET", f"{run}/divergence"),
        ("GET", f"{run}/alerts"),
        ("GET", "/api/v1/alerts"),
        ("GET", "/api/v1/alerts/{alert}"),
        ("POST", "/api/v1/alerts/{alert}/acknowledge"),
        ("POST", f"{run}/silences"),
        ("GET", f"{run}/verdict"),
        ("GET", f"{run}/stream"),
        ("GET", "/healthz"),
        ("GET", "/readyz"),
        ("GET", "/metrics"),
    } <= routes
    json.dumps(openapi)


def test_a_mistyped_run_is_suggested(client):
    for run in ("brave-otter", "brave-badger", "calm-otter"):
        post(client, batch(run=run, columns={"loss": column([0], [1.0])}))
    detail = check_problem(client.get("/api/v1/runs/brave-oter"), 404)["detail"]
    assert detail.startswith("there is no run 'brave-oter'; did you mean 'brave-otter'")
    # What somebody has begun to write.
    detail = check_problem(client.get("/api/v1/runs/calm"), 404)["detail"]
    assert "did you mean 'calm-otter'?" in detail
    assert "did you mean" not in check_problem(client.get("/api/v1/runs/xyz"), 404)["detail"]
