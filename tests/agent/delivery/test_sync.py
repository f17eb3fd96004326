"""`rankscope sync`: idempotent, resumable, and honest about what it could not send."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.agent.cli import main
from rankscope.agent.delivery.spool import SpoolFolder, folder_of
from rankscope.agent.delivery.sync import sync
from tests.support.servers.collector import LOSE, Collector, Reply


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """Two ranks' leftovers, five batches each."""
    for rank in range(2):
        folder = SpoolFolder(folder_of(tmp_path / "spool", "run", rank, "s"))
        assert folder.acquire()
        for seq in range(5):
            steps = np.arange(10 * seq, 10 * seq + 10)
            column = wire.Column(steps, steps.astype(float))
            batch = wire.Batch(run="run", rank=rank, session="s", seq=seq, columns={"loss": column})
            folder.write(seq, wire.encode(batch))
        folder.close()
    return tmp_path / "spool"


def files(spool: Path, kind: str = "batch") -> int:
    return len(list(spool.rglob(f"*.{kind}")))


def test_everything_is_sent_and_removed(collector: Collector, spool: Path) -> None:
    report = sync(spool, collector.url, None)

    assert (report.sent, report.left, report.runs, report.problem) == (10, 0, ["run"], "")
    assert [b.seq for b in collector.batches] == [*range(5), *range(5)]
    assert len(collector.points("loss", rank=1)) == 50
    assert list(spool.iterdir()) == []


def test_a_part_of_a_spool(collector: Collector, spool: Path) -> None:
    assert sync(spool / "run" / "1-s", collector.url, None).sent == 5
    assert {b.rank for b in collector.batches} == {1}


def test_cut_off_and_called_again(collector: Collector, spool: Path) -> None:
    collector.replies.extend([Reply(), Reply(), LOSE, Reply(status=404)])

    first = sync(spool, collector.url, None, patience=0.0)
    second = sync(spool, collector.url, None)

    # The third batch arrived although its answer was lost: its number is known.
    assert (first.sent, first.left) == (2, 8)
    assert "404" in first.problem
    assert (second.sent, second.duplicates, second.left) == (8, 1, 0)
    assert len(collector.batches) == 10


def test_a_busy_server_is_waited_for(collector: Collector, spool: Path) -> None:
    collector.replies.extend([Reply(status=503)] * 2)

    assert sync(spool, collector.url, None, patience=10.0).left == 0


def test_without_a_server_everything_stays(spool: Path) -> None:
    report = sync(spool, Collector().url, None, patience=0.0)

    assert (report.sent, report.left) == (0, 10)
    assert "Connection refused" in report.problem
    assert files(spool) == 10


def test_what_is_refused_or_damaged_is_kept_aside(collector: Collector, spool: Path) -> None:
    collector.replies.append(Reply(status=422, body={"detail": "no such project"}))
    (spool / "run" / "1-s" / "000003.batch").write_bytes(b"")

    report = sync(spool, collector.url, None)

    assert (report.sent, report.refused, report.damaged, report.left) == (8, 1, 1, 0)
    assert "no such project" in report.problem
    assert (files(spool), files(spool, "refused"), files(spool, "damaged")) == (0, 1, 1)
    assert sync(spool, collector.url, None).sent == 0


def test_what_is_not_for_the_token_does_not_hold_up_the_rest(
    collector: Collector, spool: Path
) -> None:
    collector.replies.append(Reply(status=403, body={"detail": "not of this project"}))
    report = sync(spool, collector.url, "token")
    assert (report.sent, report.left) == (5, 5)
    assert "did not take a batch" in report.problem
    assert files(spool) == 5
    collector.requests = 0
    collector.always = Reply(status=403, body={"detail": "not of this project"})
    for rank in range(2, 12):
        folder = SpoolFolder(folder_of(spool, "run", rank, "s"))
        assert folder.acquire()
        folder.write(0, wire.encode(wire.Batch(run="run", rank=rank, session="s", seq=0)))
        folder.close()
    report = sync(spool, collector.url, "token")
    assert (report.sent, report.left) == (0, 15)
    assert collector.requests == 8
    collector.requests, collector.always = 0, Reply(status=401, body={"detail": "no token"})
    assert sync(spool, collector.url, "token").left == 15
    assert collector.requests == 1


def test_an_older_server_is_given_what_it_knows(collector: Collector, tmp_path: Path) -> None:
    folder = SpoolFolder(folder_of(tmp_path / "spool", "run", 0, "s"))
    assert folder.acquire()
    batch = wire.Batch(run="run", rank=0, session="s", seq=0, rows=((0, {"loss": 0.5}),))
    folder.write(0, wire.encode(batch))
    folder.close()
    # As a server of before rows refuses them.
    collector.replies.append(Reply(status=422, body={"detail": "v: version 7 is not known here"}))

    report = sync(tmp_path / "spool", collector.url, None)

    assert (report.sent, report.refused, report.left) == (1, 0, 0)
    assert collector.points("loss") == {0: 0.5}


def test_what_is_too_large_is_split(collector: Collector, spool: Path) -> None:
    collector.largest_body = 300

    report = sync(spool, collector.url, None)

    assert report.left == report.refused == 0
    assert report.sent > 10
    assert len(collector.points("loss", rank=0)) == 50


def test_a_split_that_was_cut_off_is_taken_up(collector: Collector, spool: Path) -> None:
    collector.replies.extend([Reply(status=413), Reply(), Reply(status=404)])

    first = sync(spool, collector.url, None, patience=0.0)
    second = sync(spool, collector.url, None)

    assert (first.sent, first.left) == (1, 10)
    assert second.left == 0
    assert collector.duplicates == 0
    assert [len(collector.points("loss", rank)) for rank in range(2)] == [50, 50]


# ---------------------------------------------------------------------------------- the command


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, collector: Collector, spool: Path) -> None:
    monkeypatch.setenv("RANKSCOPE_SPOOL", str(spool))
    monkeypatch.setenv("RANKSCOPE_SERVER", collector.url)
    monkeypatch.setenv("RANKSCOPE_TOKEN", "s3cret")


@pytest.mark.usefixtures("environment")
def test_the_command_sends_the_spool(
    collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sync"]) == 0
    assert capsys.readouterr().out == "sent 10 batches of run\n"
    assert set(collector.authorizations) == {"Bearer s3cret"}


@pytest.mark.usefixtures("environment")
def test_the_command_has_nothing_to_do(
    spool: Path, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    sync(spool, collector.url, None)

    assert main(["sync", str(spool)]) == 0
    assert capsys.readouterr().out == f"nothing waits in {spool}\n"


@pytest.mark.usefixtures("environment")
def test_the_command_says_what_is_left(
    collector: Collector, spool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = {
        "status": 401,
        "detail": "the token has expired",
        "instance": "/api/v1/ingest",
    }
    collector.always = Reply(status=401, body=refusal)

    assert main(["sync"]) == 3
    said = capsys.readouterr().out
    assert "does not let you in: it answers 401" in said
    assert "away" not in said
    assert f"10 batches are left in {spool}" in said
    assert "the token has expired" in said
    assert "s3cret" not in said


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("arguments", [["--server", "nonsense"], ["/no/such/folder"], ["--colour"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["sync", *arguments])

    assert exit.value.code == 2
    assert "usage: rankscope sync" in capsys.readouterr().err
