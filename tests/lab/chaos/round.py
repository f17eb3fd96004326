"""One round: faults drawn by a seed, and then an account of every point."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import select

from rankscope.agent.delivery.spool import DamagedFile, SpoolFolder, folders_below
from rankscope.agent.delivery.sync import sync
from rankscope.server.demo.processes import PYTHON, Process
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import open_engine, reading
from tests.lab.chaos.faults import FAULTS
from tests.lab.chaos.proxy import Proxy, points_of
from tests.lab.chaos.rank import loss_of
from tests.support.servers.service import Service, eventually

_RUN = "chaos"
_RANKS = 3
# Steps between two lives of a rank: each life has steps of its own.
_LIFE = 100_000
# A busy machine takes long to start and to end processes.
_PATIENCE_S = 300.0
# The largest answer of a query for one series.
_MOST_POINTS = 100_000


@dataclass
class Account:
    """What became of the points of a round.

    Attributes:
        faults: names, in their order.
        produced: points that ranks reported to their agent.
        acknowledged: of those, how many the server has answered for.
        spooled: how many were on disk when all ranks had ended.
        stored: how many the server has at the end.
        lost: acknowledged or spooled, and not stored; or published by a rank that ended in order
            and neither stored nor reported as dropped.
        twice: stored more than once.
        altered: stored with another value.
        dropped: points that the agents reported as given up, by reason.
        busy: posts that were answered with 429.
        died: points of killed ranks that were on their way in memory.
    """

    database: str
    seed: int
    faults: list[str] = field(default_factory=list)
    produced: int = 0
    acknowledged: int = 0
    spooled: int = 0
    stored: int = 0
    lost: int = 0
    twice: int = 0
    altered: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    busy: int = 0
    died: int = 0
    seconds: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether nothing was lost, stored twice, or altered."""
        return not (self.lost or self.twice or self.altered) and self.stored > 0


class Round:
    """A server, a proxy and ranks.

    Args:
        database: URL; None: an SQLite file in the folder.
        number: of faults.
    """

    def __init__(self, folder: Path, seed: int, database: str | None, number: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder = folder
        self.ranks = _RANKS
        self.chance = random.Random(f"round {seed}")
        self.database = database or f"sqlite:///{folder / 'rankscope.db'}"
        self.kind = "sqlite" if database is None else "postgresql"
        self.service = Service(folder, database=database)
        self.proxy = Proxy(self.service.port, seed)
        self.processes: list[Process] = []
        self._seed = seed
        self._number = number
        self._lives = [0] * _RANKS

    def run(self) -> Account:
        """Everything, from the start of the server to the account."""
        began = time.monotonic()
        account = Account(self.kind, self._seed)
        try:
            with self.service, self.proxy:
                self.processes = [self._start(rank) for rank in range(_RANKS)]
                self._wait_for_steps()
                for _ in range(self._number):
                    fault = self.chance.choice(FAULTS[self.kind])
                    account.faults.append(fault.__name__.strip("_"))
                    fault(self)
                    time.sleep(self.chance.uniform(0.0, 2.0))
                self._end_ranks()
                self.proxy.calm()
                self._account(account)
        finally:
            for process in self.processes:
                process.stop()
        account.seconds = round(time.monotonic() - began, 1)
        (self.folder / "account.json").write_text(json.dumps(asdict(account), indent=1))
        return account

    def restart(self, rank: int) -> None:
        """A rank is killed, and another process goes on in its place."""
        self.processes[rank].kill()
        self._lives[rank] += 1
        self.processes[rank] = self._start(rank)

    def _start(self, rank: int) -> Process:
        first = self._lives[rank] * _LIFE
        arguments = (self.proxy.url, self._spool, _RUN, rank, _RANKS, self._seed, first)
        ledger = self.folder / f"ledger-{rank}-{self._lives[rank]}"
        return Process(
            [*PYTHON[:1], "-m", "tests.lab.chaos.rank", *map(str, arguments), str(ledger)],
            log=self.folder / "ranks.log",
        )

    @property
    def _spool(self) -> Path:
        return self.folder / "spool"

    def _wait_for_steps(self) -> None:
        eventually(
            lambda: len({rank for rank, _ in self.proxy.acknowledged}) == _RANKS,
            timeout_s=_PATIENCE_S,
        )

    def _end_ranks(self) -> None:
        for process in self.processes:
            process.ask_to_end()
        for process in self.processes:
            process.wait(_PATIENCE_S)

    def _account(self, account: Account) -> None:
        spooled = self._on_disk()
        expected = self.proxy.acknowledged | spooled
        report = sync(self._spool, self.service.url, None, patience=60.0)
        if report.left or report.refused or report.damaged:
            raise AssertionError(f"sync did not send all there is: {report}")
        produced, in_order, account.dropped = self._published()
        stored = self._stored()
        lost = {point for point in expected if point not in stored}
        # Of these nothing may be missing: they had time to say what they gave up.
        missing = {point for point in in_order if point not in stored} - lost
        account.produced = len(produced)
        account.acknowledged = len(self.proxy.acknowledged)
        account.spooled = len(spooled)
        account.stored = len(stored)
        account.lost = len(lost) + max(len(missing) - sum(account.dropped.values()), 0)
        account.twice = self._rows() - len(stored)
        account.altered = sum(
            value != loss_of(self._seed, rank, step) for (rank, step), value in stored.items()
        )
        account.busy = self.proxy.busy
        account.died = len(produced - stored.keys()) - len(lost) - len(missing)

    def _on_disk(self) -> dict[tuple[int, int], float]:
        """What waits in the spool."""
        found: dict[tuple[int, int], float] = {}
        for place in folders_below(self._spool):
            folder = SpoolFolder(place)
            for seq in folder.sequence():
                try:
                    found |= points_of(folder.read(seq))
                except DamagedFile:
                    continue
        return found

    def _published(self) -> tuple[set[tuple[int, int]], set[tuple[int, int]], dict[str, int]]:
        """Points that were reported to an agent; those of agents that ended in order; dropped."""
        everything: set[tuple[int, int]] = set()
        in_order: set[tuple[int, int]] = set()
        dropped: dict[str, int] = {}
        for ledger in self.folder.glob("ledger-*"):
            rank = int(ledger.name.split("-")[1])
            lines = ledger.read_text(encoding="ascii").splitlines()
            last: Mapping[str, Any] = json.loads(lines.pop()) if lines[-1].endswith("}") else {}
            points = {(rank, int(line)) for line in lines}
            everything |= points
            if last:
                in_order |= points
            for reason, number in last.get("dropped", {}).items():
                dropped[reason] = dropped.get(reason, 0) + number
        return everything, in_order, dropped

    def _stored(self) -> dict[tuple[int, int], float]:
        """As the server's own answer has it, which is raw where so few points are asked for."""
        found = {}
        for rank in range(_RANKS):
            for life in range(self._lives[rank] + 1):
                answer = self.service.get(
                    f"/runs/{_RUN}/series",
                    metric="loss",
                    rank=rank,
                    from_step=life * _LIFE,
                    to_step=(life + 1) * _LIFE - 1,
                    max_points=_MOST_POINTS,
                )
                for line in answer["series"]:
                    values = map(float, line["values"])
                    found |= {(rank, s): v for s, v in zip(line["steps"], values, strict=True)}
        return found

    def _rows(self) -> int:
        """Losses in the database, each time one is there."""
        engine = open_engine(self.database)
        try:
            with reading(engine) as connection:
                m, layout, c = schema.metric.c, schema.layout.c, schema.chunk.c
                loss = connection.scalar(select(m.id).where(m.name == "loss", m.kind == "scalar"))
                with_loss = {
                    row.id
                    for row in connection.execute(select(layout.id, layout.metrics))
                    if loss in np.frombuffer(row.metrics, "<i4")
                }
                rows = connection.execute(select(c.layout, c.points))
                return sum(row.points for row in rows if row.layout in with_loss)
        finally:
            engine.dispose()
