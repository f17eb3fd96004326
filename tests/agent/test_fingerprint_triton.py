"""Triton's kernels against the host's.

Where there is CUDA they run there, otherwise in Triton's interpreter, which needs no device.
"""

import importlib.util
import os

import numpy as np
import pytest
import torch
from support.fingerprints import DTYPES, sample

from rankscope.agent.fingerprint import FingerprintPlan
from rankscope.agent.fingerprint.constants import BLOCK, BUCKETS

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if HERE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, Triton's own too
from rankscope.agent.fingerprint.device_triton import TritonKernels  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    if HERE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def on_device(tensors):
    there = [t.to(HERE) for t in tensors]
    kernels = TritonKernels(there, HERE)
    readable = [kernels.readable(t) for t in there]
    addresses = torch.tensor([t.data_ptr() for t in readable], device=HERE)
    digests = torch.full((len(tensors),), -1, dtype=torch.int64, device=HERE)
    sketches = torch.full((len(tensors), BUCKETS), np.nan, dtype=torch.float64, device=HERE)
    kernels.launch(addresses, digests, sketches)
    return digests.cpu().numpy().view(np.uint64), sketches.cpu().numpy()


def assert_like_the_host(tensors):
    names = [str(i) for i in range(len(tensors))]
    host = FingerprintPlan(names, tensors).compute(tensors, sketches=True)
    digests, sketches = on_device(tensors)
    np.testing.assert_array_equal(digests, host.digests)
    np.testing.assert_allclose(sketches, host.sketches, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype):
    assert_like_the_host([sample((1037,), dtype=dtype), sample((), seed=1, dtype=dtype)])


# A word cut off, a row cut off, more than one tile of a digest (32 rows), more than 64 blocks (a
# second block in each tile of a sketch), more than one round of tiles (64 * 32 blocks).
@pytest.mark.parametrize(
    ("count", "dtype"),
    [
        (3, torch.int8),
        (BLOCK - 1, torch.float16),
        (33 * BLOCK + 5, torch.float32),
        (67 * BLOCK + 1, torch.float32),
        (64 * 32 * BLOCK + 700, torch.bool),
    ],
    ids=str,
)
def test_every_edge(count, dtype):
    assert_like_the_host([sample((count,), seed=count, dtype=dtype)])


def test_tensors_of_several_dtypes_and_layouts_together():
    tensors = [
        sample((70, 33)).t(),
        sample((5,), dtype=torch.int64),
        sample((2, 3, 8, 8)).to(memory_format=torch.channels_last),
        sample((9,), dtype=torch.bfloat16)[1:],
        sample((7,), dtype=torch.complex64).conj(),
        sample((4 * BLOCK,), dtype=torch.float16),
    ]
    assert_like_the_host(tensors)


@pytest.mark.skipif(HERE.type == "cpu", reason="needs CUDA")
def test_the_step_path_waits_for_no_device():
    tensors = [sample((1000, 300), seed=i).to(HERE) for i in range(4)]
    plan = FingerprintPlan([str(i) for i in range(4)], tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = plan.begin(tensors, sketches=True)
        pending.ready()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    host = [t.cpu() for t in tensors]
    expected = FingerprintPlan(plan.names, host).compute(host, sketches=True)
    found = pending.result()
    np.testing.assert_array_equal(found.digests, expected.digests)
    np.testing.assert_allclose(found.sketches, expected.sketches, rtol=1e-12, atol=1e-9)
