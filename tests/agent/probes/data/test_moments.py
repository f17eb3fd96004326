"""How inputs are distributed: the same of data alike, whatever their form."""

import pytest
import torch

from rankscope.agent.probes.data.moments import NUMBERS, TOKENS, InputMoments


def images(seed, count=512, **kind):
    made = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return (made * torch.linspace(0.2, 1, 8)).to(**kind)


def moments(*given):
    found = InputMoments().of(given)
    assert found is not None
    return found


def test_batches_of_the_same_data_have_the_same_but_for_chance():
    (name, one), (_, other) = moments(images(0)), moments(images(1))
    assert (name, one.shape, one.dtype) == (NUMBERS, (12,), torch.float32)
    # 64 samples of each are looked at.
    assert float((one - other).abs().max()) < 0.2
    mirrored = moments(images(1).flip(-1))[1]
    assert float((one - mirrored).abs().max()) > 0.3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_of_any_precision(dtype):
    expected = moments(images(0))[1]
    assert torch.allclose(moments(images(0, dtype=dtype))[1].float(), expected, atol=2e-2)


def test_pixels_of_a_file_are_numbers():
    pixels = (images(0) * 255).to(torch.uint8)
    name, found = moments(pixels)
    assert name == NUMBERS
    assert torch.allclose(found[:4] / 255, moments(images(0))[1][:4], atol=2e-2)


def test_images_with_channels_last_are_not_copied():
    big = torch.rand(64, 3, 64, 64).to(memory_format=torch.channels_last)
    assert moments(big)[1].isfinite().all()
    assert InputMoments().of([torch.rand(64, 3, 128, 64)[:, :, ::2]]) is None


def test_batches_of_any_size_with_channels_last_are_looked_at_alike():
    large = images(0, 40).to(memory_format=torch.channels_last)
    again = torch.cat((large, large)).to(memory_format=torch.channels_last)
    assert torch.allclose(moments(large)[1], moments(again[:40])[1])
    big = torch.rand(64, 3, 64, 64).to(memory_format=torch.channels_last)
    few = moments(big[:8])[1]
    assert torch.allclose(moments(torch.cat([big[:8]] * 8))[1], few, atol=1e-4)


def test_autocast_does_not_make_them_of_half_precision():
    pixels = images(0) * 255
    with torch.autocast("cpu", dtype=torch.float16):
        found = moments(pixels)[1]
    assert found.isfinite().all()
    assert torch.equal(found, moments(pixels)[1])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_inputs_have_none():
    assert (
        InputMoments().of([torch.quantize_per_tensor(torch.rand(4, 3), 0.1, 0, torch.qint8)])
        is None
    )


def test_tokens_and_their_order():
    text = torch.randint(0, 50, (64, 40), generator=torch.Generator().manual_seed(0))
    text = text.sort(dim=1).values
    name, found = moments(text)
    assert (name, found.shape) == (TOKENS, (12,))
    assert float(found.abs().max()) <= 1
    turned = moments(text.flip(1))[1]
    assert torch.allclose(found[:8], turned[:8], atol=1e-6)
    assert float((found[8:] - turned[8:]).abs().max()) > 0.1
    other = moments(text + 50)[1]
    assert float((found - other).abs().max()) > 0.2


def test_users_have_no_neighbours():
    name, found = moments(torch.arange(100))
    assert name == TOKENS
    assert found[8:].tolist() == [0, 0, 0, 0]


def test_real_numbers_count_before_whole_ones():
    assert moments(torch.arange(8), torch.rand(8, 3))[0] == NUMBERS


@pytest.mark.parametrize(
    "given", [(), (torch.rand(()),), (torch.rand(5),), (torch.empty(0, 3),), (torch.ones(3) > 0,)]
)
def test_what_has_none(given):
    assert InputMoments().of(given) is None


def test_sequences_of_any_length_do_not_pile_up():
    taken = InputMoments()
    for length in range(1, 200):
        taken.of([torch.rand(2, length)])
    assert len(taken._directions) <= 64


def test_no_random_number_is_drawn():
    given = images(0)
    state = torch.get_rng_state()
    moments(given)
    moments(torch.arange(12).reshape(3, 4))
    assert torch.equal(torch.get_rng_state(), state)
