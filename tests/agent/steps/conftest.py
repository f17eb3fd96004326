"""What listens to torch's own hooks is of the test that runs."""

import pytest


@pytest.fixture(autouse=True)
def alone(nobody_else_listens: None) -> None:
    """Earlier tests' monitors are notified of no step of this one."""
