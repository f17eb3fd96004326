"""What the server reads off a sketch is what the agent put in."""

import numpy as np
import pytest
import torch

from rankscope.agent.fingerprint import FingerprintPlan
from rankscope.server.comparison import element_sums


@pytest.mark.parametrize("size", [4, 10, 63, 64])
def test_the_sum_of_a_small_tensor_is_known_exactly(size):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size))
    plan = FingerprintPlan(("head.bias",), (tensor,))
    sketches = plan.compute((tensor,), sketches=True).sketches
    made = element_sums.of_elements(7, np.array([0]), sketches[None], ("head.bias",), ((size,),))
    assert made.step == 7
    assert made.sums[0, 0] == pytest.approx(float(tensor.double().sum()), abs=1e-12)
    assert made.norms[0, 0] == pytest.approx(float(tensor.double().norm()), rel=1e-12)


def test_larger_tensors_and_single_numbers_are_left_out():
    sketches = np.zeros((2, 3, 64))
    ranks = np.array([0, 1])
    names, shapes = ("a", "b", "c"), ((65,), (), (2, 2))
    made = element_sums.of_elements(0, ranks, sketches, names, shapes)
    assert made.names == ("c",)
    assert element_sums.of_elements(0, ranks, sketches[:, :2], names[:2], shapes[:2]) is None
