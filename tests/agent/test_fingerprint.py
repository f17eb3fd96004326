"""Digest and sketch against a plain numpy twin, and the properties that diagnosis rests on."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.agent.fingerprint import FingerprintPlan
from rankscope.agent.fingerprint.constants import (
    BUCKETS,
    ROW,
    SKETCH_CHUNK,
    multipliers,
    row_multipliers,
    sign_offsets,
    signs,
)
from rankscope.agent.fingerprint.plan import (
    _row_sums_device,
    _row_sums_host,
    digest,
    sketch,
    words,
)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def twin_digest(array):
    """The formula of the module's docstring, in Python integers."""
    flat = np.ascontiguousarray(array).reshape(-1)
    size = min(flat.dtype.itemsize, 4)
    integers = flat.view(f"i{size}").tolist()
    inner = multipliers().view(np.uint64).tolist()
    outer = row_multipliers(-(-len(integers) // ROW)).tolist()
    total = 0
    for position, word in enumerate(integers):
        total += outer[position // ROW] * word * inner[position % ROW]
    return total % 2**64


def twin_sketch(array):
    flat = np.asarray(array, dtype=np.float64).reshape(-1)
    offsets = sign_offsets(-(-len(flat) // SKETCH_CHUNK))
    total = np.zeros(BUCKETS)
    for position, value in enumerate(flat):
        sign = signs()[offsets[position // SKETCH_CHUNK] + position % SKETCH_CHUNK]
        total[position % BUCKETS] += sign * value
    return total


def sample(shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 3
    return values.to(dtype) if dtype is not torch.complex64 else torch.complex(values, values + 1)


@pytest.mark.parametrize(
    "count", [1, 63, ROW, ROW + 1, 9 * ROW + 7, SKETCH_CHUNK, 2 * SKETCH_CHUNK + 5]
)
def test_digest_and_sketch_equal_the_twin(count):
    tensor = sample((count,), seed=count)
    assert digest(tensor) == twin_digest(tensor.numpy())
    np.testing.assert_allclose(sketch(tensor), twin_sketch(tensor.numpy()), rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gathered_path_gives_what_the_single_path_gives(dtype):
    tensors = [sample(s, seed=i, dtype=dtype) for i, s in enumerate([(5,), (), (7, 9), (64,)])]
    tensors.append(sample((0, 3), dtype=dtype))
    tensors.append(sample((SKETCH_CHUNK + 5,), dtype=dtype))
    plan = FingerprintPlan([str(i) for i in range(len(tensors))], tensors)
    prints = plan.compute(tensors, sketches=True)
    for index, tensor in enumerate(tensors):
        assert int(prints.digests[index]) == digest(tensor)
        np.testing.assert_allclose(prints.sketches[index], sketch(tensor), rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("count", [1, ROW - 1, ROW, 20 * ROW + 11])
def test_the_device_path_gives_what_the_host_path_gives(count):
    flat = words(sample((count,), seed=count))
    np.testing.assert_array_equal(_row_sums_host(flat), _row_sums_device(flat))


@settings(deadline=None, max_examples=150)
@given(
    count=st.integers(1, 3000),
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
)
def test_any_flipped_bit_changes_the_digest(count, data, dtype):
    tensor = sample((count,), seed=count, dtype=dtype)
    raw = tensor.clone().view(torch.uint8)
    position = data.draw(st.integers(0, raw.numel() - 1))
    raw[position] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(raw.view(dtype)) != digest(tensor)


def test_a_flipped_bit_in_a_late_row_changes_the_digest():
    tensor = sample((150_003,))
    changed = tensor.clone()
    changed.view(torch.int32)[140_017] ^= 1 << 31
    assert digest(changed) != digest(tensor)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: -t,
        lambda t: t.flip(0),
        lambda t: t.roll(1, 0),
        lambda t: t.t().contiguous(),
        lambda t: torch.cat([t[1:2], t[0:1], t[2:]]),
        lambda t: t + 1e-6,
        lambda t: t.reshape(-1)[torch.randperm(t.numel())].view(t.shape),
    ],
    ids=["negated", "rows reversed", "rows rolled", "transposed", "swapped", "shifted", "shuffled"],
)
def test_what_blinds_other_hashes_changes_this_one(change):
    tensor = sample((64, 64))
    assert digest(change(tensor)) != digest(tensor)


def test_constants_differ():
    found = {digest(torch.full((64, 32), v)) for v in (0.0, 1.0, 2.0, -1.0, 0.5)}
    assert len(found) == 5


def test_layout_does_not_matter_and_order_does():
    tensor = sample((2, 3, 8, 8))
    assert digest(tensor.to(memory_format=torch.channels_last)) == digest(tensor)
    assert digest(tensor.t().contiguous() if tensor.dim() == 2 else tensor.flip(0)) != digest(
        tensor
    )


def test_threads_do_not_matter():
    tensor = sample((1_000_001,))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = digest(tensor), sketch(tensor)
        torch.set_num_threads(2)
        two = digest(tensor), sketch(tensor)
    finally:
        torch.set_num_threads(before)
    assert one[0] == two[0]
    np.testing.assert_array_equal(one[1], two[1])


def test_the_word_knows_which_tensor_is_which():
    a, b = sample((8,), 1), sample((8,), 2)
    plan = FingerprintPlan(["a", "b"], [a, b])
    straight = plan.compute([a, b], sketches=False)
    swapped = plan.compute([b, a], sketches=False)
    assert plan.word(straight.digests) != plan.word(swapped.digests)


@settings(deadline=None, max_examples=30)
@given(count=st.integers(1, 5000), seed=st.integers(0, 1000))
def test_the_sketch_is_linear(count, seed):
    a = sample((count,), seed).double()
    b = sample((count,), seed + 1).double()
    np.testing.assert_allclose(sketch(a + b), sketch(a) + sketch(b), rtol=1e-9, atol=1e-9)


def test_a_single_changed_element_is_measured_exactly():
    tensor = sample((200_000,))
    changed = tensor.clone()
    changed[123_456] += 0.25
    step = float(changed[123_456] - tensor[123_456])
    distance = np.linalg.norm(sketch(changed) - sketch(tensor))
    assert distance == pytest.approx(step, rel=1e-6)


def test_one_unit_in_the_last_place_of_one_element_is_not_lost():
    tensor = sample((1_000_000,))
    changed = tensor.clone()
    changed[777] = torch.nextafter(changed[777], torch.tensor(10.0))
    assert digest(changed) != digest(tensor)
    assert np.linalg.norm(sketch(changed) - sketch(tensor)) > 0


def differences(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    if kind == "random":
        return torch.randn(512, 256, generator=generator)
    if kind == "sparse":
        difference = torch.zeros(512 * 256)
        where = torch.randint(0, difference.numel(), (50,), generator=generator)
        difference[where] = torch.randn(50, generator=generator)
        return difference.view(512, 256)
    left = torch.randn(512, 1, generator=generator)
    return left @ torch.randn(1, 256, generator=generator)


@pytest.mark.parametrize("kind", ["random", "sparse", "low rank"])
def test_distance_error_is_within_the_bound(kind):
    # Standard error sqrt(1 / (2 K)) = 8.6 % at K = 67; the mean over 40 seeds must be unbiased
    # within 3 of its own standard errors, and no seed further off than 4.5.
    ratios = []
    for seed in range(40):
        difference = differences(kind, seed)
        ratios.append(float(np.linalg.norm(sketch(difference)) / difference.norm()))
    errors = np.array(ratios) - 1
    assert abs(errors).max() < 4.5 * 0.086
    assert errors.std() < 1.4 * 0.086
    assert abs(errors.mean()) < 3 * 0.086 / np.sqrt(40) + 0.01
