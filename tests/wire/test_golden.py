"""Bytes written by earlier versions are readable for ever.

The files in `golden/` are never changed. When the wire grows, a new file is added beside them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from rankscope.agent import wire
from tests.support.batches import same

GOLDEN = Path(__file__).parent / "golden"

SMALL = wire.Batch(run="brisk-heron-0421-3f9c", rank=0, seq=7, through_step=41)

FULL = wire.Batch(
    project="vision",
    run="run 1/2 é",
    rank=3,
    session="5f1d7c0a9b3e2468",
    attempt=2,
    seq=12,
    world_size=4,
    sent_at=1_700_000_000.25,
    through_step=4,
    state="failed",
    phase="backward",
    error="RuntimeError: out of memory",
    hello=wire.Hello(
        started_at=1_699_999_999.5,
        host="node-7",
        pid=4242,
        local_rank=1,
        launcher="torchrun",
        wrapper="DistributedDataParallel",
        heartbeat_seconds=2.0,
        tables={
            "parameters": wire.TensorTable(
                names=("conv.weight", "conv.bias"),
                shapes=((8, 1, 3, 3), ()),
                dtypes=("float32", "bfloat16"),
                shards=("", "0/2"),
            )
        },
        config={"optimizer": {"name": "SGD", "lr": 0.1}, "amp": False, "tags": ["a", None]},
    ),
    columns={
        "loss": wire.Column(np.arange(5), np.array([2.5, math.nan, math.inf, -math.inf, -0.0])),
        "lr": wire.Column(np.array([4, 0]), np.array([0.1, 5e-324])),
    },
    words={
        "parameters": wire.Column(
            np.arange(0, 12, 4), np.array([0, 2**53 + 1, 2**64 - 1], np.uint64)
        )
    },
    prints=(
        wire.Fingerprint(
            step=0,
            stage="start",
            table="parameters",
            digests=np.array([1, 2**63], np.uint64),
            sketches=np.array([[0.5, -1.0, math.nan], [math.inf, 0.0, 3.0]]),
        ),
        wire.Fingerprint(
            step=4, stage="parameters", table="parameters", digests=np.array([3, 4], np.uint64)
        ),
    ),
    events=(wire.Event(step=2, kind="mark", text="epoch 1", data={"epoch": 1}),),
    dropped={"memory_full": 9},
)

# `Layers` and the stages beside the chain came later.
LAYERS = wire.Batch(
    run="r",
    rank=1,
    seq=3,
    layers=(
        wire.Layers(
            step=32, table="parameters", metric="grad_norm", values=np.array([0.5, math.nan])
        ),
        wire.Layers(step=32, table="buffers", metric="norm", values=np.array([math.inf])),
    ),
    words={
        name: wire.Column(np.arange(2), np.array([7, 2**64 - 1], np.uint64))
        for name in ("local_gradient", "buffers", "rng/torch")
    },
    prints=(
        wire.Fingerprint(
            step=32, stage="buffers", table="buffers", digests=np.array([9], np.uint64)
        ),
        wire.Fingerprint(
            step=32, stage="watched", table="watched/ema", digests=np.array([], np.uint64)
        ),
    ),
)

# With version 2 points may stand in rows.
ROWS = wire.Batch(
    run="r",
    rank=1,
    seq=4,
    rows=(
        (3, {"loss": 0.5, "lr": math.nan}),
        (4, {"loss": math.inf}),
        (3, {"loss": 0.25}),
    ),
    word_rows=((3, {"parameters": 2**64 - 1, "rng/torch": 0}),),
)

EXPECTED = {"v1/small": SMALL, "v1/full": FULL, "v1/layers": LAYERS, "v2/rows": ROWS}


@pytest.mark.parametrize("name", EXPECTED)
def test_bytes_of_every_version_are_understood(name: str) -> None:
    read = wire.decode((GOLDEN / f"{name}.msgpack").read_bytes())

    assert same(read, wire.in_columns(EXPECTED[name]))


@pytest.mark.parametrize("name", EXPECTED)
def test_json_of_every_version_is_understood(name: str) -> None:
    text = (GOLDEN / f"{name}.json").read_text()

    assert same(wire.from_json(json.loads(text)), wire.in_columns(EXPECTED[name]))


@pytest.mark.parametrize("name", EXPECTED)
def test_the_first_version_that_can_read_it_is_what_is_written_today(name: str) -> None:
    # A new optional field is written where it says something only, so that this stays true.
    assert wire.VERSION == 2
    assert wire.encode(EXPECTED[name]) == (GOLDEN / f"{name}.msgpack").read_bytes()


def test_every_golden_file_is_tested() -> None:
    files = {path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*") if path.is_file()}

    assert files == {f"{name}.{form}" for name in EXPECTED for form in ("msgpack", "json")}
