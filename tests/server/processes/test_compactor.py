"""The thread that rolls up what comes."""

import threading

import numpy as np

from rankscope.agent import wire
from rankscope.server.processes import compactor
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.ingest.batches import store_batch
from rankscope.server.storage.maintenance.compaction import runs_to_compact


def test_what_comes_is_rolled_up_by_itself(sqlite, monkeypatch):
    done = threading.Event()
    compact = compactor.compact

    def reported(engine, run):
        more = compact(engine, run)
        if not more:
            done.set()
        return more

    monkeypatch.setattr(compactor, "compact", reported)
    column = wire.Column(np.arange(5000), np.zeros(5000))
    with writing(sqlite) as connection:
        sent = wire.Batch(run="r", rank=0, seq=0, session="s", columns={"loss": column})
        store_batch(connection, sent, received_at=1000.0)
    made = compactor.Compactor(sqlite, period=0.01, share=1.0)
    made.start()
    try:
        assert done.wait(30)
    finally:
        made.stop()
    with reading(sqlite) as connection:
        assert runs_to_compact(connection) == []
