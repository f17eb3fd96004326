"""One batch must not cost the server, and with it every other run, more than an honest one does."""

from __future__ import annotations

import gzip
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from rankscope.agent import wire
from tests.support.servers.service import Service

pytestmark = pytest.mark.e2e

MEBIBYTE = 2**20


def peak_memory(pid: int) -> int:
    """The most memory that a process has ever had, bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def family(pid: int) -> list[int]:
    """A process and those that it has started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += family(int(child))
    return found


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_few_kilobytes_cannot_fill_the_memory(tmp_path: Path) -> None:
    many = 16 * MEBIBYTE
    maps = b"\x81\xa1x\xdd" + many.to_bytes(4, "big") + b"\x80" * many
    lists = b'{"x": [' + b"[]," * (many // 3) + b"0]}"
    # Lists in lists, each of which says it has a million parts.
    deep = b"\x81\xa1x" + b"\xdd\x00\x0f\x00\x00" * 500
    headers = {"Content-Encoding": "gzip"}
    bodies = [
        *[(gzip.compress(maps, 9), wire.CONTENT_TYPE)] * 4,
        *[(gzip.compress(lists, 9), "application/json")] * 4,
        (gzip.compress(deep), wire.CONTENT_TYPE),
    ]
    assert max(len(body) for body, _ in bodies) < 64 * 1024

    with Service(tmp_path) as service:

        def post(sent: tuple[bytes, str]) -> int:
            body, kind = sent
            return httpx.post(
                f"{service.url}/api/v1/ingest",
                content=body,
                headers=headers | {"Content-Type": kind},
                timeout=120,
            ).status_code

        # The server works as ever before the count begins.
        assert post((gzip.compress(wire.encode(wire.Batch(run="r", rank=0, seq=0))), bodies[0][1]))
        before = [peak_memory(pid) for pid in family(service.pid)]
        with ThreadPoolExecutor(len(bodies)) as pool:
            assert {*pool.map(post, bodies)} == {422}
        after = [peak_memory(pid) for pid in family(service.pid)]

    # Two bodies at a time, unpacked; before there were limits it was 8,000 MiB.
    assert sum(after) - sum(before) < 250 * MEBIBYTE
