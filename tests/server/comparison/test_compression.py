"""Which tensors torch's hooks leave as they are."""

import numpy as np
import pytest
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress

from rankscope.server.comparison.compression import NONE, Compression, of_config

SHAPES = ((20, 8), (8, 8), (8,), (), (64, 3, 7, 7), (2, 1000), (16, 16), (512, 512))


def config(*hooks, **more):
    return {"data_parallel": {"communication_hooks": list(hooks), **more}}


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("rate", [0.5, 2.0])
def test_as_the_hook_itself_decides(rank, rate):
    known = of_config(config("powerSGD_hook", low_rank={"rank": rank, "least_rate": rate}))
    expected = []
    for shape in SHAPES:
        rows, columns = (shape[0], int(np.prod(shape[1:]))) if shape else (1, 1)
        made = _should_compress(rows, columns, min(rows, columns, rank), rate)[0]
        expected.append(made and shape != ())
    assert known.lossy(SHAPES).tolist() == expected


def test_whole_buckets_leave_none_alone():
    low = {"rank": 1, "least_rate": 2}
    assert of_config(config("batched_powerSGD_hook", low_rank=low)).lossy(SHAPES).all()


@pytest.mark.parametrize(
    ("said", "known"),
    [
        ({}, NONE),
        (config(), NONE),
        (config("my_hook"), NONE),
        (config("fp16_compress_hook"), Compression(half=True, small=True)),
        (config("bf16_compress_hook"), Compression(half=True)),
        (
            config(
                "fp16_compress_wrapper.<locals>.fp16_compress_wrapper_hook",
                low_rank={"rank": 2, "least_rate": 2},
            ),
            Compression(2, 2.0, half=True, small=True),
        ),
        (config("powerSGD_hook", low_rank={"rank": "2"}), NONE),
    ],
)
def test_what_ranks_say_of_their_hooks(said, known):
    assert of_config(said) == known


def test_float16_takes_more_of_the_small_ones():
    sizes = np.array([1.0, 1e-6, 0.0])
    lost = Compression(half=True, small=True).rounding(sizes, [100, 100, 100], 4)
    assert lost[0] < 1e-5
    assert lost[1] > 1
    assert lost[2] == np.inf
    assert not NONE.rounding(sizes, [100, 100, 100], 4).any()
