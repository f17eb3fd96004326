"""Posts to the server and reads from it, as agents and users do."""

import time

import numpy as np

from rankscope.agent import wire

MSGPACK = {"Content-Type": wire.CONTENT_TYPE}


def column(steps, values, dtype=np.float64):
    return wire.Column(np.array(steps, np.int64), np.array(values, dtype))


def batch(rank=0, seq=0, run="otter", **fields):
    fields.setdefault("hello", wire.Hello(started_at=1000.0) if seq == 0 else None)
    return wire.Batch(run=run, rank=rank, seq=seq, session=f"s{rank}", **fields)


def post(client, sent, **headers):
    return client.post("/api/v1/ingest", content=wire.encode(sent), headers=MSGPACK | headers)


def get(client, path, **params):
    answer = client.get(f"/api/v1{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_problem(answer, status):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/problem+json")
    body = answer.json()
    assert body["status"] == status
    assert {"type", "title", "detail", "instance"} <= set(body)
    assert "Traceback" not in answer.text
    return body


def fingerprints(step, wrong):
    """Two tensors, of which the second is wrong or not (1 or 0)."""
    digests = np.array([11, 22 + wrong], np.uint64)
    sketches = np.ones((2, 8))
    sketches[1] += 0.5 * wrong
    return wire.Fingerprint(
        step=step, stage="parameters", table="parameters", digests=digests, sketches=sketches
    )


TABLE = wire.TensorTable(("a.weight", "b.weight"), ((2, 2), (3,)), ("float32",) * 2, ("", ""))


def desynced(client, ranks=4, since=30, steps=60, suspects=2, run="otter"):
    """A run one rank of which leaves the others."""
    for rank in range(ranks):
        wrong = np.array([rank == suspects and s >= since for s in range(steps)])
        digests = np.where(wrong, 7, 5).astype(np.uint64)
        sent = batch(
            rank,
            run=run,
            world_size=ranks,
            state="finished",
            through_step=steps - 1,
            hello=wire.Hello(started_at=1000.0, host=f"node-{rank}", tables={"parameters": TABLE}),
            columns={
                "loss": column(range(steps), np.linspace(2, 1, steps) + 0.01 * rank),
                "grad_norm": column(range(steps), np.full(steps, 3.0)),
            },
            words={"parameters": column(range(steps), digests, np.uint64)},
            prints=tuple(fingerprints(s, int(wrong[s])) for s in range(0, steps, 4)),
        )
        assert post(client, sent).status_code == 200


def evaluated(client, run="otter"):
    """What is said of a run once all that came was evaluated."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        about = get(client, f"/runs/{run}")
        if about["evaluated_step"] >= about["last_step"] >= 0:
            return about
        time.sleep(0.02)
    raise AssertionError("the run was not evaluated")
