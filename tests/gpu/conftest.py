"""What only a real CUDA device can say; without one these tests are skipped."""

from __future__ import annotations

import os

import pytest
import torch

# Before CUDA is initialised: its matrix products are to be repeatable where that is asked for.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
