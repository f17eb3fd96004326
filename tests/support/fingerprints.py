"""Tensors for the tests of fingerprints, and what digest and sketch are by definition."""

import numpy as np
import torch

from rankscope.agent.fingerprint import FingerprintPlan
from rankscope.agent.fingerprint.constants import BLOCK, BUCKETS, table

# Torch has it since 2.7.
SCALES = [torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    *SCALES,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64, *SCALES)
MASK = 2**64 - 1


def sample(shape, seed=0, dtype=torch.float32):
    """Random numbers of any dtype, about three times standard normal, floats of all magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 3
    if dtype.is_complex:
        return torch.complex(values, values + 1).to(dtype)
    if dtype.is_floating_point:
        # Subnormal ones of the 16-bit types among them.
        values = values * 10.0 ** torch.randint(-6, 2, (values.numel(),), generator=generator).view(
            values.shape
        )
    return (values.abs() if dtype in UNSIGNED else values).to(dtype)


def fingerprint_of(tensor):
    """Digest and sketch of one tensor."""
    found = FingerprintPlan(["x"], [tensor]).compute([tensor], sketches=True)
    return int(found.digests[0]), found.sketches[0]


def digest(tensor):
    return fingerprint_of(tensor)[0]


def sketch(tensor):
    return fingerprint_of(tensor)[1]


def block_hash(block):
    """splitmix64, in Python's integers."""
    z = (block + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def defined_digest(octets):
    """The formula of plan.py for the bytes of a tensor, in Python's integers."""
    octets = octets + bytes(-len(octets) % 4)
    multipliers = table().tolist()
    total = 0
    for i in range(len(octets) // 4):
        word = int.from_bytes(octets[4 * i : 4 * i + 4], "little", signed=True)
        total += (block_hash(i // BLOCK) | 1) * word * multipliers[i % BLOCK]
    return total % 2**64


def defined_sketch(numbers):
    """The formula of plan.py for real numbers in logical order."""
    bits = table().view(np.uint32).tolist()
    total = np.zeros(BUCKETS)
    for i, value in enumerate(np.asarray(numbers, dtype=np.float64).tolist()):
        b, j = divmod(i, BLOCK)
        hashed = block_hash(b)
        negative = bits[j] >> (31 - (hashed >> 59)) & 1 ^ (hashed >> 58 & 1)
        bucket = (8 * ((j // 8 + j // 64) % 8) + j % 8 + 27 * b) % 64
        total[bucket] += -value if negative else value
    return total
