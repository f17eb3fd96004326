"""Arrays without torch have the fingerprints that tensors of the same bits have."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from rankscope.agent.fingerprint import FingerprintPlan
from rankscope.agent.fingerprint import array_plan as arrays
from rankscope.agent.fingerprint.array_plan import ArrayPlan, host_array

SIZES = (1, 7, 512, 5000, 70_001)
DTYPES = (
    "float64",
    "float32",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "complex128",
)


def drawn(dtype, size):
    generator = np.random.default_rng(size)
    octets = generator.integers(0, 256, size=size * np.dtype(dtype).itemsize, dtype=np.uint8)
    if dtype == "bool":
        octets &= 1
    array = octets.view(dtype)
    if array.dtype.kind in "fc":  # bits at random are NaN now and then, and no two sums then agree
        array = generator.normal(size=size).astype(dtype)
    return array


@pytest.fixture(params=["kernel", "numpy"])
def library(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(arrays.kernel, "load", lambda: None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_and_tensors_have_the_same(dtype, library):
    given = {str(size): drawn(dtype, size) for size in SIZES}
    tensors = [torch.from_numpy(a) for a in given.values()]
    plan = FingerprintPlan(tuple(given), tensors)
    expected = plan.compute(tensors, sketches=True)
    mine = ArrayPlan(tuple(given))
    for held in ([host_array(a) for a in given.values()], [host_array(t) for t in tensors]):
        digests, sketches = mine.compute(held, sketches=True)
        assert digests.tolist() == expected.digests.tolist()
        scale = 1e-12 * np.abs(expected.sketches).max()
        np.testing.assert_allclose(sketches, expected.sketches, rtol=1e-9, atol=scale)
        assert mine.model_digest(digests) == plan.model_digest(expected.digests)
        again, none = mine.compute(held, sketches=False)
        assert none is None
        assert again.tolist() == digests.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_types_that_numpy_has_not(dtype, library):
    tensor = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = FingerprintPlan(("w",), [tensor]).compute([tensor], sketches=True)
    digests, sketches = ArrayPlan(("w",)).compute([host_array(tensor)], sketches=True)
    assert digests.tolist() == expected.digests.tolist()
    np.testing.assert_allclose(sketches, expected.sketches, rtol=1e-9, atol=1e-9)


def test_layout_and_byte_order_do_not_matter(library):
    array = drawn("float32", 5000).reshape(50, 100)
    plan = ArrayPlan(("w",))
    first = plan.compute([host_array(array)], sketches=False)[0].tolist()
    for same in (np.asfortranarray(array), array.astype(">f4"), np.stack([array, array])[1]):
        assert plan.compute([host_array(same)], sketches=False)[0].tolist() == first
    assert plan.compute([host_array(array.T)], sketches=False)[0].tolist() != first


def test_empty_and_single_elements(library):
    digests, sketches = ArrayPlan(("a", "b")).compute(
        [host_array(np.zeros((0, 3))), host_array(np.float32(2.5))], sketches=True
    )
    assert digests[0] == 0
    assert digests[1] != 0
    assert np.abs(sketches).sum(axis=1).tolist() == [0.0, 2.5]


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([None]), np.array([1], dtype="M8[s]")])
def test_what_is_no_numbers_is_refused(array):
    with pytest.raises(TypeError, match="arrays of numbers"):
        host_array(array)


def test_start_needs_no_torch(tmp_path):
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np\n"
        "from rankscope import agent\n"
        f"m = agent.start(mode='offline', run='r', spool={str(tmp_path)!r})\n"
        "m.step(loss=1.0, parameters={'w': np.ones(3)}, gradients={'w': np.ones(3)})\n"
        "assert not m._guard.faults, m._guard.faults\n"
        "m.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("*"))
