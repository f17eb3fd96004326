"""`GET /runs/{run}/data`: what each rank read, out of what agents post."""

import pytest

from rankscope.agent.wire import codec
from rankscope.server.evaluation import data_ledger
from tests.support.runs.read_data import ReadRun
from tests.support.servers.api import MSGPACK, batch, check_problem, column, get, post

SHARED = ReadRun("shared", ranks=4, steps=48, epoch=24, same=((2, 1),))


def post_run(client, run: ReadRun) -> None:
    for sent in run.batches():
        answer = client.post("/api/v1/ingest", content=codec.encode(sent), headers=MSGPACK)
        assert answer.status_code == 200, answer.text


def test_two_ranks_with_one_part_of_the_data(client):
    post_run(client, SHARED)
    found = get(client, "/runs/shared/data")
    assert (found["from_step"], found["to_step"]) == (0, 47)
    assert (found["complete"], found["identified"]) == (True, "samples")
    assert found["passes"] == [0, 24]
    assert found["shared"] == [{"ranks": [1, 2], "share": 1.0}]
    by_rank = {one["rank"]: one for one in found["ranks"]}
    # Of each batch of 8 all samples are known.
    assert by_rank[2]["other_rank"] == 48 * 8
    assert by_rank[2]["same_step"] == by_rank[1]["same_step"] == 48
    assert by_rank[0]["same_step"] == 0
    assert by_rank[0]["new"] + by_rank[0]["earlier_pass"] == 48 * 8
    assert by_rank[3]["batch_size"] == {"least": 8, "typical": 8, "most": 8}


def test_a_range_of_steps(client):
    post_run(client, SHARED)
    found = get(client, "/runs/shared/data", from_step=10, to_step=19)
    assert (found["from_step"], found["to_step"]) == (10, 19)
    assert [one["batches"] for one in found["ranks"]] == [10] * 4


def test_of_too_many_batches_the_newest(client, monkeypatch):
    post_run(client, SHARED)
    # Of the digest `batch` alone: 4 ranks, 20 steps.
    monkeypatch.setattr(data_ledger, "_MOST", 80)
    found = get(client, "/runs/shared/data")
    assert (found["from_step"], found["to_step"], found["complete"]) == (28, 47, False)


def test_a_run_whose_ranks_report_no_batches(client):
    post(client, batch(columns={"loss": column([0, 1], [1.0, 2.0])}))
    found = get(client, "/runs/otter/data")
    assert found == {
        "from_step": None,
        "to_step": None,
        "complete": True,
        "identified": None,
        "passes": [],
        "ranks": [],
        "shared": [],
    }
    check_problem(client.get("/api/v1/runs/none/data"), 404)


@pytest.mark.parametrize("part", ["batch", "batch/part"])
def test_batches_of_which_no_sample_is_known(client, part):
    for rank in range(2):
        words = {part: column([0, 1, 2, 3], [1, 2, 3 + rank, 4 + rank], "uint64")}
        post(client, batch(rank, words=words))
    found = get(client, "/runs/otter/data")
    assert found["identified"] == "batches"
    assert [one["same_step"] for one in found["ranks"]] == [2, 2]
    # Of three that rank 0 has on its own side and rank 1 has, too: 1, 2 and 4.
    assert found["shared"] == [{"ranks": [0, 1], "share": 0.75}]
