"""A server that answers the gate what a test says."""

import threading
from collections.abc import Iterator

import pytest

from tests.support.servers.recorded import Recorded


@pytest.fixture
def server() -> Iterator[Recorded]:
    with Recorded() as recorded:
        thread = threading.Thread(target=recorded.serve_forever, args=(0.01,))
        thread.start()
        yield recorded
        recorded.shutdown()
        thread.join()
