"""Whoever sends or asks for much keeps nobody else waiting, and is told when to come again."""

import asyncio
import fcntl
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from rankscope.agent import wire
from rankscope.server.api import ingest, runs
from rankscope.server.api.admission import Admission, Busy
from rankscope.server.app import create_app
from rankscope.server.settings import Settings
from rankscope.server.storage.database.engine import writing
from tests.server.api.test_tokens import bearer, make
from tests.support.servers.api import MSGPACK, batch, check_problem, column
from tests.support.servers.serve_app import serve_app
from tests.support.servers.service import Service, eventually

PATH = "/api/v1/ingest"
# Longer than a busy machine takes.
PATIENCE_S = 120


def body(run, rank=0, seq=0):
    return wire.encode(batch(rank, seq, run, columns={"loss": column([seq], [1.0 + rank])}))


class Taken:
    """Batches that hold a place or wait for one, by their run."""

    def __init__(self, admission):
        self.admission = admission
        self.order = []
        self.tasks = []

    async def enter(self, number, run, sender="here"):
        async def one():
            await self.admission.enter(sender, run)
            self.order.append(run)

        tasks = [asyncio.create_task(one()) for _ in range(number)]
        self.tasks += tasks
        await asyncio.sleep(0)
        return tasks

    async def end(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def test_a_run_leaves_places_for_those_that_come_later():
    async def check():
        taken = Taken(Admission(at_once=16, longest_wait=60))
        await taken.enter(100, "greedy")
        assert taken.order == ["greedy"] * 8
        await taken.enter(2, "honest")
        assert taken.order[8:] == ["honest"] * 2
        # Each place that becomes free is for whoever holds less than is free.
        taken.admission.leave("here", "greedy")
        await asyncio.sleep(0)
        assert taken.admission.under_way <= 10
        await taken.end()

    asyncio.run(check())


def test_a_run_holds_less_while_another_one_sends():
    async def check():
        taken = Taken(Admission(at_once=128, longest_wait=60))
        await taken.enter(100, "greedy")
        assert len(taken.order) == 64
        await taken.enter(1, "honest")
        for _ in range(60):
            taken.admission.leave("here", "greedy")
            await asyncio.sleep(0)
        # From 64 down to 32, and then one for each that is done.
        assert len(taken.order) == 65 + 28
        await taken.end()

    asyncio.run(check())


def test_those_who_wait_take_turns_by_sender_and_run():
    async def check():
        admission = Admission(at_once=4, longest_wait=60)
        taken = Taken(admission)
        for sender in "abc":
            await taken.enter(1, "first", sender)
        await taken.enter(50, "much", "a")
        await taken.enter(2, "little", "a")
        await taken.enter(2, "other", "d")
        taken.order.clear()
        for sender in "abc":
            admission.leave(sender, "first")
            await asyncio.sleep(0)
        # One of each before another of the first one, whose batches came before all of theirs.
        for _ in range(8):
            for sender, run in (("a", "much"), ("a", "little"), ("d", "other")):
                if admission._runs[sender, run]:
                    admission.leave(sender, run)
                    await asyncio.sleep(0)
        assert set(taken.order[:4]) == {"much", "little", "other"}
        await taken.end()

    asyncio.run(check())


def test_who_would_wait_for_long_is_told_when_to_come_again():
    async def check():
        admission = Admission(at_once=2)
        taken = Taken(admission)
        await taken.enter(61, "slow")
        # One place becomes free every 50 ms, and somebody waits for it each time.
        for _ in range(30):
            await asyncio.sleep(0.05)
            admission.leave("here", "slow")
        await asyncio.sleep(0)
        assert (admission.refused, admission.waiting) == (0, 30)
        more = await taken.enter(100, "slow")
        await asyncio.sleep(0)
        refused = [task.exception() for task in more if task.done()]
        # About forty have their turn within two seconds; on a busy machine fewer.
        assert 80 <= len(refused) <= 100
        assert all(isinstance(error, Busy) and 1 <= error.retry_after <= 30 for error in refused)
        assert len({error.retry_after for error in refused}) > 1  # not all at the same moment
        # For another run they do not count: it comes soon.
        await taken.enter(1, "other")
        assert admission.refused == len(refused)
        await taken.end()

    asyncio.run(check())


def test_nobody_waits_for_ever():
    async def check():
        admission = Admission(at_once=2, longest_stall=0.05)
        taken = Taken(admission)
        await taken.enter(40, "greedy")
        done, waiting = await asyncio.wait(taken.tasks, timeout=PATIENCE_S)
        assert not waiting
        failed = [task.exception() for task in done if task.exception()]
        assert len(failed) == 39
        assert all(isinstance(error, Busy) for error in failed)
        assert (admission.waiting, admission.refused) == (0, 39)

    asyncio.run(check())


def test_whoever_gives_up_waiting_loses_no_place():
    async def check():
        admission = Admission(at_once=2, longest_wait=60)
        taken = Taken(admission)
        await taken.enter(1, "one")
        gone = await taken.enter(3, "one")
        # The first of them has just been given the place.
        admission.leave("here", "one")
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        assert (admission.under_way, admission.waiting) == (0, 0)

    asyncio.run(check())


def test_bodies_of_one_sender_leave_room_for_others():
    admission = Admission(max_bytes=1000)
    for _ in range(5):
        admission.hold("greedy", 100)
    with pytest.raises(Busy):
        admission.hold("greedy", 100)
    admission.hold("honest", 300)
    with pytest.raises(Busy):
        admission.hold("third", 201)  # more than there is
    for _ in range(5):
        admission.let_go("greedy", 100)
    admission.hold("greedy", 100)


def test_a_server_that_cannot_keep_up_says_so_and_loses_nothing(tmp_path):
    """A server of its own whose database takes nothing for a while."""
    with Service(tmp_path) as service, httpx.Client(base_url=service.url, timeout=60) as client:
        assert client.post(PATH, content=body("honest"), headers=MSGPACK).status_code == 200
        limits = httpx.Limits(max_connections=300)

        def post(run, rank):
            return client_of_many.post(PATH, content=body(run, rank), headers=MSGPACK)

        with (
            open(tmp_path / "rankscope.db-lock", "rb") as turn,
            httpx.Client(base_url=service.url, timeout=PATIENCE_S, limits=limits) as client_of_many,
            ThreadPoolExecutor(260) as pool,
        ):
            fcntl.flock(turn, fcntl.LOCK_EX)  # whose turn it is to write: nobody else's
            greedy = [pool.submit(post, "greedy", rank) for rank in range(200)]
            refused = []
            eventually(
                lambda: refused.extend(f.result() for f in greedy if f.done()) or refused,
                timeout_s=PATIENCE_S,
            )
            honest = pool.submit(post, "honest", 1)
            for answer in refused:
                assert "again" in check_problem(answer, 429)["detail"]
                assert int(answer.headers["retry-after"]) >= 1
            time.sleep(3)
            assert not honest.done()  # it holds a place, although the other one came before
            fcntl.flock(turn, fcntl.LOCK_UN)
            assert honest.result().json()["accepted"] == 1
            answers = [future.result() for future in greedy]
        assert {answer.status_code for answer in answers} == {200, 429}
        for rank, answer in enumerate(answers):
            if answer.status_code == 429:
                again = client.post(PATH, content=body("greedy", rank), headers=MSGPACK)
                assert again.json()["accepted"] == 1
        series = client.get("/api/v1/runs/greedy/series", params={"metric": "loss"}).json()
        assert [s["values"] for s in series["series"]] == [[1.0 + rank] for rank in range(200)]
        lines = client.get("/metrics").text.splitlines()
        busy = next(int(line.split()[1]) for line in lines if line.startswith("rankscope_busy_"))
        assert busy == sum(answer.status_code == 429 for answer in answers)
    assert "Traceback" not in (tmp_path / "server.log").read_text()


@pytest.fixture
def app(tmp_path):
    return create_app(Settings(database=f"sqlite:///{tmp_path / 'test.db'}", evaluate=False))


def test_a_post_that_never_ends_is_ended(app, monkeypatch):
    monkeypatch.setattr(ingest, "_BODY_SECONDS", 0.2)
    with serve_app(app) as client:
        url = client.base_url
        for part in (b"", b"\x81"):
            with socket.create_connection((url.host, url.port), timeout=PATIENCE_S) as connection:
                head = (
                    f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                    f"{wire.CONTENT_TYPE}\r\nContent-Length: 1000\r\n\r\n"
                )
                connection.sendall(head.encode() + part)
                said = b""
                while received := connection.recv(4096):
                    said += received
            assert said.startswith(b"HTTP/1.1 408")
            assert b"application/problem+json" in said
        assert client.post(PATH, content=body("honest"), headers=MSGPACK).status_code == 200


def test_readers_keep_no_batch_waiting(app, monkeypatch):
    """Also where each batch has a token, which is looked up in the database."""
    release = threading.Event()
    reading = threading.Semaphore(0)

    known = runs.known_run

    def slow(*given):
        reading.release()
        release.wait(PATIENCE_S)
        return known(*given)

    with serve_app(app) as client, ThreadPoolExecutor(60) as pool:
        assert client.post(PATH, content=body("honest"), headers=MSGPACK).status_code == 200
        secret = make(app.state.engine, "all", "read", "write")[1]
        client.headers.update(bearer(secret))
        eventually(
            lambda: client.get("/api/v1/runs/honest").status_code == 200, timeout_s=PATIENCE_S
        )
        monkeypatch.setattr(runs, "known_run", slow)
        limits = httpx.Limits(max_connections=60)
        try:
            with httpx.Client(
                base_url=client.base_url, timeout=PATIENCE_S, limits=limits, headers=client.headers
            ) as pages:
                asked = [pool.submit(pages.get, "/api/v1/runs/honest") for _ in range(60)]
                assert reading.acquire(timeout=PATIENCE_S)
                time.sleep(1)
                app.state.guard._read_at = float("-inf")  # the tokens are read anew
                posted = client.post(
                    PATH, content=body("honest", seq=1), headers=MSGPACK, timeout=20
                )
                assert posted.json()["accepted"] == 1
                for path in ("/healthz", "/readyz"):
                    assert client.get(path, timeout=20).status_code == 200
                release.set()
                assert {future.result().status_code for future in asked} == {200}
        finally:
            release.set()


def test_a_run_of_which_much_waits_is_stored_no_sooner_than_others(app):
    async def check(writer, engine):
        for run in ("greedy", "honest"):
            await writer.store(batch(1, 0, run))
        with writing(engine):  # nothing else is stored meanwhile
            done = []

            async def store(run, seq):
                await writer.store(batch(0, seq, run, columns={"loss": column([seq], [1.0])}))
                done.append(run)

            tasks = [asyncio.create_task(store("greedy", seq)) for seq in range(600)]
            await asyncio.sleep(0.1)
            tasks.append(asyncio.create_task(store("honest", 0)))
            await asyncio.sleep(0.1)
        await asyncio.gather(*tasks)
        return done.index("honest")

    with serve_app(app):
        # One transaction was under way, one more is its own.
        assert asyncio.run(check(app.state.writer, app.state.engine)) < 520


def test_a_run_that_is_known_does_not_wait_for_many_new_ones(app):
    async def check(writer, engine):
        await writer.store(batch(0, 0, "honest"))
        with writing(engine):  # nothing else is stored meanwhile
            done = []

            async def store(run, rank):
                await writer.store(batch(rank, 1, run))
                done.append(run)

            tasks = [asyncio.create_task(store(f"new-{n}", 0)) for n in range(500)]
            await asyncio.sleep(0.1)
            tasks += [asyncio.create_task(store("honest", rank)) for rank in range(64)]
            await asyncio.sleep(0.1)
        await asyncio.gather(*tasks)
        return len(done) - 1 - done[::-1].index("honest")

    with serve_app(app):
        # All of its ranks, before a third of the new ones; some of which were under way.
        assert asyncio.run(check(app.state.writer, app.state.engine)) < 64 + 500 / 3
