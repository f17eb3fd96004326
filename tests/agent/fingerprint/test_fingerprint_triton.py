"""Triton's kernels against the host's.

Where there is CUDA they run there, otherwise in Triton's interpreter, which needs no device.
"""

import numpy as np
import pytest
import torch

from rankscope.agent.fingerprint import FingerprintPlan
from rankscope.agent.fingerprint.constants import BLOCK
from tests.support.fingerprints import DTYPES, sample
from tests.support.triton_interpreter import TritonInterpreter, computed

# Here it compiles, as in every trainer: the interpreter has to be in another process.
pytest.importorskip("triton", reason="needs Triton, which is made for Linux on x86-64")
CUDA = torch.device("cuda") if torch.cuda.is_available() else None


@pytest.fixture(scope="module")
def kernels():
    """What the kernels make of tensors."""
    if CUDA is not None:
        yield lambda tensors: computed([t.to(CUDA) for t in tensors], CUDA)
        return
    with TritonInterpreter() as interpreter:
        yield interpreter.computed


def assert_like_the_host(kernels, tensors):
    names = [str(i) for i in range(len(tensors))]
    host = FingerprintPlan(names, tensors).begin(tensors, sketches=True, squares=True).result()
    found = kernels(tensors)
    for digests in ("digests", "digests alone"):
        np.testing.assert_array_equal(found[digests].numpy().view(np.uint64), host.digests)
    for sketches in ("sketches", "sketches alone", "one by one"):
        np.testing.assert_allclose(found[sketches], host.sketches, rtol=1e-12, atol=1e-9)
    for squares in ("squares", "squares alone", "squares one by one"):
        np.testing.assert_allclose(found[squares], host.squares, rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(kernels, dtype):
    assert_like_the_host(kernels, [sample((1037,), dtype=dtype), sample((), seed=1, dtype=dtype)])


# A word cut off, a row cut off, more than one tile of a digest (32 rows), more than 64 blocks (a
# second block in each tile of a sketch), more than one round of tiles (64 * 32 blocks),
# more of them than one program adds up (256).
@pytest.mark.parametrize(
    ("count", "dtype"),
    [
        (3, torch.int8),
        (BLOCK - 1, torch.float16),
        (33 * BLOCK + 5, torch.float32),
        (67 * BLOCK + 1, torch.float32),
        (64 * 32 * BLOCK + 700, torch.bool),
        (4 * 64 * 32 * BLOCK + 700, torch.int8),
    ],
    ids=str,
)
def test_every_edge(kernels, count, dtype):
    assert_like_the_host(kernels, [sample((count,), seed=count, dtype=dtype)])


def test_tensors_of_several_dtypes_and_layouts_together(kernels):
    tensors = [
        sample((70, 33)).t(),
        sample((5,), dtype=torch.int64),
        sample((2, 3, 8, 8)).to(memory_format=torch.channels_last),
        sample((9,), dtype=torch.bfloat16)[1:],
        sample((7,), dtype=torch.complex64).conj(),
        sample((4 * BLOCK,), dtype=torch.float16),
    ]
    assert_like_the_host(kernels, tensors)


@pytest.mark.skipif(CUDA is None, reason="needs CUDA")
def test_the_step_path_waits_for_no_device():
    tensors = [sample((1000, 300), seed=i).to(CUDA) for i in range(4)]
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
