"""Every way to the same fingerprint: layouts, threads, numpy, torch's operations, no compiler."""

import sys
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.agent.fingerprint import FingerprintPlan, kernel, portable
from rankscope.agent.fingerprint.constants import BLOCK, BUCKETS, table
from rankscope.agent.fingerprint.device import DeviceTensors
from rankscope.agent.fingerprint.device_torch import TorchKernels
from rankscope.agent.fingerprint.results import Results
from rankscope.agent.fingerprint.values import lookup, lookup_row
from tests.support.fingerprints import DTYPES, block_hash, fingerprint_of, sample

CPU = torch.device("cpu")
counts = st.one_of(st.integers(1, 2000), st.sampled_from([BLOCK, 64 * BLOCK, 65 * BLOCK + 3]))


def assert_same(found, expected):
    assert found[0] == expected[0]
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-12, atol=1e-9)


def by_numpy(tensor):
    return portable.digest(tensor), portable.sketch(tensor)


def by_torch(tensor):
    results = Results(
        torch.zeros(1, BUCKETS, dtype=torch.float64),
        torch.zeros(1, dtype=torch.float64),
        torch.zeros(1, dtype=torch.int64),
    )
    TorchKernels([tensor], CPU).launch([tensor], results, sketches=True, digests=True)
    return int(results.digests.numpy().view(np.uint64)[0]), results.sketches[0].numpy()


@pytest.fixture
def library():
    found = kernel.load()
    if found is None:
        pytest.skip("the kernel could not be built here: no C compiler")
    yield found
    found.rankscope_choose(2)


@pytest.mark.parametrize("way", [by_numpy, by_torch])
@settings(deadline=None, max_examples=60)
@given(count=counts, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1000))
def test_numpy_and_torch_give_what_the_kernel_gives(way, count, dtype, seed):
    tensor = sample((count,), seed, dtype)
    assert_same(way(tensor), fingerprint_of(tensor))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_cpu_gives_the_same(dtype, library):
    tensor = sample((70 * BLOCK + 77,), dtype=dtype)
    best = fingerprint_of(tensor)
    used = set()
    for wanted in (0, 1):
        used.add(library.rankscope_choose(wanted))
        assert_same(fingerprint_of(tensor), best)
    assert 0 in used


@pytest.mark.parametrize("cpu", [None, 0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_squares_are_summed_in_float64(dtype, cpu, library, monkeypatch):
    tensors = [sample((size,), dtype=dtype) for size in (70 * BLOCK + 77, 3, 2 * BLOCK)]
    wide = [t.to(torch.complex128) if dtype.is_complex else t.double() for t in tensors]
    expected = [float((w.abs() ** 2).sum()) for w in wide]
    if cpu is None:
        monkeypatch.setattr(kernel, "load", lambda: None)
    else:
        library.rankscope_choose(cpu)
    plan = FingerprintPlan("abc", tensors)
    assert plan.compute(tensors, sketches=True).squares is None
    for sketches, digests in ((True, True), (True, False), (False, False)):
        found = plan.begin(tensors, sketches=sketches, digests=digests, squares=True)
        np.testing.assert_allclose(found.squares, expected, rtol=1e-12)
        whole = plan.compute(tensors, sketches=True)
        if sketches:
            np.testing.assert_array_equal(found.result().sketches, whole.sketches)
        if digests:
            np.testing.assert_array_equal(found.result().digests, whole.digests)


def test_squares_of_what_is_not_finite_are_not():
    tensors = [torch.ones(1000), torch.ones(1000)]
    tensors[0][777], tensors[1][3] = float("nan"), float("inf")
    plan = FingerprintPlan("ab", tensors)
    for sketches in (True, False):
        squares = plan.begin(tensors, sketches=sketches, squares=True).squares
        assert np.isnan(squares[0])
        assert np.isinf(squares[1])


def test_all_halves_are_read_as_torch_reads_them(library):
    # Subnormal numbers, both zeros, infinities and NaN among them.
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    finite = every[torch.isfinite(every)]
    for number in (finite, finite.abs()[:2048]):
        assert_same((0, fingerprint_of(number)[1]), (0, fingerprint_of(number.double())[1]))
    assert np.isinf(fingerprint_of(every[0x7C00:0x7C01])[1]).sum() == 1
    assert np.isnan(fingerprint_of(every[0x7C01:0x7C02])[1]).sum() == 1


def test_all_floats_of_one_byte_are_read_as_torch_reads_them():
    octets = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    for dtype in DTYPES:
        if (row := lookup_row(dtype)) is not None:
            row = lookup()[row]
            np.testing.assert_array_equal(row, octets.view(dtype).float().numpy())


def test_one_that_is_not_finite_spoils_one_bucket_only():
    tensor = sample((100_000,))
    for value in (float("nan"), float("inf")):
        tensor[77_777] = value
        for way in (fingerprint_of, by_numpy, by_torch):
            assert np.isfinite(way(tensor)[1]).sum() == BUCKETS - 1


LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "each second": lambda t: torch.stack([t, t + 1], -1)[..., 0],
    "unaligned": lambda t: torch.cat([t.reshape(-1)[:1], t.reshape(-1)])[1:].view(t.shape),
    "rows of a larger one": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "expanded and back": lambda t: t.unsqueeze(0).expand(3, *t.shape)[1],
    "asking for gradients": lambda t: t.clone().requires_grad_(),
}


@pytest.mark.parametrize("way", [fingerprint_of, by_numpy, by_torch])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@settings(deadline=None, max_examples=15)
@given(rows=st.integers(1, 60), columns=st.integers(1, 60))
def test_layout_does_not_matter(layout, way, rows, columns):
    tensor = sample((rows, columns), seed=rows)
    assert_same(way(layout(tensor)), fingerprint_of(tensor))


def test_layouts_of_images_and_of_complex_numbers():
    images = sample((2, 3, 8, 8))
    assert_same(
        fingerprint_of(images.to(memory_format=torch.channels_last)), fingerprint_of(images)
    )
    numbers = sample((50,), dtype=torch.complex64)
    conjugated = torch.conj(numbers)
    assert conjugated.is_conj()
    negative = torch._neg_view(sample((50,)))
    assert negative.is_neg()
    assert negative.is_contiguous()
    for way in (fingerprint_of, by_numpy, by_torch):
        assert_same(way(conjugated), fingerprint_of(conjugated.resolve_conj()))
        assert_same(way(conjugated.imag), fingerprint_of(-numbers.imag))
        assert_same(way(negative), fingerprint_of(-sample((50,))))


def mixture():
    return [
        sample((5,)),
        sample(()),
        sample((0, 3)),
        sample((64, 65), dtype=torch.bfloat16),
        sample((30, 20)).t(),
        sample((7,), dtype=torch.complex128),
        sample((3 * BLOCK,), dtype=torch.bool),
        sample((9, 9), dtype=torch.int64).t(),
    ]


def test_a_plan_gives_each_tensor_what_it_gets_alone():
    tensors = mixture()
    plan = FingerprintPlan([str(i) for i in range(len(tensors))], tensors)
    for _ in range(2):
        pending = plan.begin(tensors, sketches=True)
        assert pending.ready()
        found = pending.result()
        for index, tensor in enumerate(tensors):
            assert_same((int(found.digests[index]), found.sketches[index]), fingerprint_of(tensor))
    assert found.digests[2] == 0
    assert not found.sketches[2].any()
    only = plan.compute(tensors, sketches=False)
    assert only.sketches is None
    np.testing.assert_array_equal(only.digests, found.digests)


def test_without_a_kernel_a_plan_gives_the_same(monkeypatch):
    tensors = mixture()
    names = [str(i) for i in range(len(tensors))]
    expected = FingerprintPlan(names, tensors).compute(tensors, sketches=True)
    monkeypatch.setattr(kernel, "load", lambda: None)
    found = FingerprintPlan(names, tensors).compute(tensors, sketches=True)
    np.testing.assert_array_equal(found.digests, expected.digests)
    np.testing.assert_allclose(found.sketches, expected.sketches, rtol=1e-12, atol=1e-9)


def test_what_a_device_has_under_way_is_not_overwritten():
    tensors = [sample((1000,)), sample((3, 3), dtype=torch.bool)]
    on_device = DeviceTensors([1, 0], tensors, CPU)
    runs, expected = [], []
    for step in range(4):
        tensors[0] += step
        runs.append(on_device.begin(tensors, sketches=True))
        expected.append([fingerprint_of(t) for t in tensors])
    for run, then in zip(runs, expected, strict=True):
        digests, sketches = np.zeros(2, dtype=np.uint64), np.zeros((2, BUCKETS))
        assert run.ready()
        run.write(digests, sketches)
        for row in range(2):
            assert_same((int(digests[row]), sketches[row]), then[row])


def test_room_is_used_again_once_the_results_were_fetched_or_forgotten():
    tensors = [sample((10,))]
    on_device = DeviceTensors([0], tensors, CPU)
    digests = np.zeros(1, dtype=np.uint64)
    kept = on_device.begin(tensors, sketches=False)
    for step in range(10):
        run = on_device.begin(tensors, sketches=False)
        if step % 2:
            run.write(digests, None)
        del run
    assert len(on_device._slots) == 2
    kept.write(digests, None)
    assert int(digests[0]) == fingerprint_of(tensors[0])[0]


def test_threads_do_not_matter():
    tensor = sample((1_000_001,))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append((fingerprint_of(tensor), by_numpy(tensor)))
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*found, strict=True):
        assert one[0] == two[0]
        np.testing.assert_array_equal(one[1], two[1])


def test_other_threads_run_meanwhile(library):
    # Without the GIL another thread counts on; with it, it could not before the call is over.
    tensor = torch.zeros(64_000_000)
    plan = FingerprintPlan(["x"], [tensor])
    done = threading.Event()
    count, counted = 0, []

    def compute():
        # A busy machine may have no processor for the other thread in one of them.
        for _ in range(50):
            before = count
            plan.compute([tensor], sketches=True)
            counted.append(count - before)
            if counted[-1] > 100:
                break
        done.set()

    interval = sys.getswitchinterval()
    # Only who lets go of the GIL loses it.
    sys.setswitchinterval(1000.0)
    try:
        worker = threading.Thread(target=compute, daemon=True)
        worker.start()
        while not done.is_set():
            count += 1
            time.sleep(0)
        worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert counted[-1] > 100, counted


def test_more_elements_than_31_bits_count():
    # Pages of zeros that nobody has written are one page of memory.
    tensor = torch.zeros(2**31 + 4 * BLOCK + 3, dtype=torch.bool)
    tensor[-1] = True
    plan = FingerprintPlan(["x"], [tensor])
    found = plan.compute([tensor], sketches=True)
    words, rest = divmod(len(tensor) - 1, 4)
    row, column = divmod(words, BLOCK)
    expected = (block_hash(row) | 1) * (1 << 8 * rest) * int(table()[column])
    assert int(found.digests[0]) == expected % 2**64
    assert np.abs(found.sketches).sum() == 1


def test_a_plan_fits_its_sizes_dtypes_and_devices():
    tensors = [sample((3, 4))]
    plan = FingerprintPlan(["x"], tensors)
    assert plan.fits([sample((3, 4), seed=1)])
    assert not plan.fits([sample((3, 5))])
    assert not plan.fits([sample((3, 4), dtype=torch.float64)])
    assert not plan.fits([torch.empty((3, 4), device="meta")])
    assert not plan.fits([])
    assert not plan.fits(tensors * 2)
    elsewhere = FingerprintPlan(["x"], [torch.empty(0, device="meta")])
    assert elsewhere.fits([torch.empty(0, device="meta")])
    assert not elsewhere.fits([torch.empty(0)])
    # Of another shape, the same bits have the same digest.
    other = tensors[0].reshape(4, 3)
    assert plan.fits([other])
    assert (
        plan.compute([other], sketches=False).digests
        == FingerprintPlan(["x"], [other]).compute([other], sketches=False).digests
    )
