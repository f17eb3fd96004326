"""Posts to the server and reads from it, as agents and users do."""

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
