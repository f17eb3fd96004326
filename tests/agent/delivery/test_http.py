"""The second post over a connection is made another way than the first, and means the same."""

from __future__ import annotations

import gzip
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rankscope.agent.delivery.http import LARGEST_ANSWER, HttpClient, NoReply, Reply
from tests.support.servers.collector import wait_until

USUAL = b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"accepted":1}'
TAKEN = Reply(200, None, b'{"accepted":1}')
CLOSED = NoReply("it closed the connection without an answer")


@dataclass
class Says:
    """What a server says to a request.

    Attributes:
        pieces: sent one after the other.
        pause: seconds between two of them.
        closes: whether it closes the connection then.
        deaf: seconds before it reads more of the request than its head.
    """

    pieces: Sequence[bytes] = (USUAL,)
    pause: float = 0.001
    closes: bool = False
    deaf: float = 0.0


@dataclass
class Server:
    """Takes requests as bytes, and answers them with bytes.

    Attributes:
        script: what it says to the requests, in order; then the usual.
        requests: head and body of each.
        connections: on which connection each came.
    """

    listening: socket.socket
    scheme: str = "http"
    script: list[Says] = field(default_factory=list)
    requests: list[tuple[bytes, bytes]] = field(default_factory=list)
    connections: list[int] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.listening.getsockname()[1]}/in"

    def serve(self) -> None:
        taken = 0
        while True:
            try:
                connection, _ = self.listening.accept()
            except OSError:
                return
            taken += 1
            with connection:
                try:
                    while self._answer(connection, taken):
                        pass
                except OSError:
                    continue  # the client went away

    def _answer(self, connection: socket.socket, number: int) -> bool:
        data = b""
        while b"\r\n\r\n" not in data:
            part = connection.recv(65536)
            if not part:
                return False
            data += part
        head, body = data.split(b"\r\n\r\n", 1)
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        says = self.script.pop(0) if self.script else Says()
        time.sleep(says.deaf)
        taken = bytearray(body)
        while len(taken) < length:
            part = connection.recv(1 << 20)
            if not part:
                return False
            taken += part
        self.requests.append((head, bytes(taken)))
        self.connections.append(number)
        for piece in says.pieces:
            connection.sendall(piece)
            time.sleep(says.pause)
        return not says.closes


@pytest.fixture
def server() -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        made = Server(listening)
        thread = threading.Thread(target=made.serve)
        thread.start()
        yield made
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def client(server: Server) -> Iterator[HttpClient]:
    made = HttpClient(server.url, {"Authorization": "Bearer s3cret"}, None)
    yield made
    made.close()


def post(client: HttpClient, body: bytes = b"batch", read: float = 5.0) -> Reply | NoReply:
    return client.post(body, connect=1.0, read=read)


def test_the_head_is_that_of_the_first_with_another_length(
    server: Server, client: HttpClient
) -> None:
    bodies = [b"batch", b"", b"x" * 300_000, b"last"]

    assert [post(client, body) for body in bodies] == [TAKEN] * 4

    assert [body for _, body in server.requests] == bodies
    assert server.connections == [1] * 4
    heads = [head.split(b"\r\n") for head, _ in server.requests]
    lengths = [head.pop(3) for head in heads]
    assert lengths == [b"Content-Length: %d" % len(body) for body in bodies]
    assert b"Authorization: Bearer s3cret" in heads[0]
    assert heads == [heads[0]] * 4


ANSWERS = {
    "usual": (Says(), TAKEN),
    "a byte at a time": (Says([USUAL[i : i + 1] for i in range(len(USUAL))]), TAKEN),
    "more headers": (
        Says(
            [
                b"HTTP/1.1 200 \r\ndate: Mon, 23 Nov 2026 00:00:00 GMT\r\nserver: s/1.0 (a; b)\r\n"
                b"content-length:14\r\ncontent-type: application/json\r\n\r\n" + TAKEN.body
            ]
        ),
        TAKEN,
    ),
    "no body": (Says([b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]), Reply(200, None, b"")),
    "another status": (
        Says([b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 4\r\n\r\nbusy"]),
        Reply(503, "7", b"busy"),
    ),
    "accepted for later": (
        Says([b"HTTP/1.1 200 OK\r\nRetry-After: 7\r\nContent-Length: 4\r\n\r\nbusy"]),
        Reply(200, "7", b"busy"),
    ),
    "chunks": (
        Says(
            [
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
                b"5\r\n" + TAKEN.body[:5] + b"\r\n",
                b"9\r\n" + TAKEN.body[5:] + b"\r\n0\r\n\r\n",
            ]
        ),
        TAKEN,
    ),
    "kept by its own word": (
        Says([USUAL.replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\n\r\n")]),
        TAKEN,
    ),
    "the last one": (
        Says([USUAL.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")], closes=True),
        TAKEN,
    ),
    "up to the end": (Says([b"HTTP/1.1 200 OK\r\n\r\n", TAKEN.body], closes=True), TAKEN),
    "an old protocol": (Says([USUAL.replace(b"1.1", b"1.0")], closes=True), TAKEN),
    "go on first": (Says([b"HTTP/1.1 100 Continue\r\n\r\n", USUAL]), TAKEN),
    "a redirect": (
        Says([b"HTTP/1.1 307 No\r\nLocation: /else\r\nContent-Length: 0\r\n\r\n"]),
        Reply(307, None, b""),
    ),
    "a page": (
        Says([b"HTTP/1.1 200 OK\r\nContent-Length: 20000\r\n\r\n", b"x" * 20000]),
        Reply(200, None, b"x" * 20000),
    ),
    "a book": (
        Says([b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n", b"x" * 200_000]),
        Reply(200, None, b"x" * (LARGEST_ANSWER + 1)),
    ),
    "bare line feeds": (
        Says([USUAL.replace(b"\r\n", b"\n")]),
        TAKEN,
    ),
    "a folded header": (
        Says([b"HTTP/1.1 200 OK\r\nX-A: b\r\n c\r\nContent-Length: 14\r\n\r\n" + TAKEN.body]),
        TAKEN,
    ),
}


@pytest.mark.parametrize("earlier", [0, 1, 2])
@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_is_understood_whenever_it_comes(
    server: Server, client: HttpClient, answer: str, earlier: int
) -> None:
    says, meant = ANSWERS[answer]
    server.script = [Says()] * earlier + [says]

    assert [post(client) for _ in range(earlier + 2)] == [TAKEN] * earlier + [meant, TAKEN]
    # One that was answered, whatever it was, is not made again, and no connection given up for it.
    given_up = says.closes or len(meant.body) > LARGEST_ANSWER
    assert server.connections == [1] * (earlier + 1) + [2 if given_up else 1]


def test_a_compressed_answer_is_read(server: Server, client: HttpClient) -> None:
    body = gzip.compress(TAKEN.body)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    server.script = [Says([head + body]) for _ in range(5)]

    assert [post(client) for _ in range(3)] == [TAKEN] * 3


@pytest.mark.parametrize(
    "piece", [b"", USUAL[:9], USUAL[:-20], USUAL[:-1]], ids=["before", "status", "head", "body"]
)
def test_an_answer_that_breaks_off_is_none(
    server: Server, client: HttpClient, piece: bytes
) -> None:
    server.script = [Says(), Says([piece], closes=True)]
    assert post(client) == TAKEN

    assert post(client, b"again") == TAKEN

    # Made again at once, over a new connection: the server takes no batch twice.
    assert [body for _, body in server.requests[1:]] == [b"again", b"again"]
    assert server.connections == [1, 1, 2]


def test_a_server_that_always_breaks_off(server: Server, client: HttpClient) -> None:
    server.script = [Says(), *[Says([USUAL[:9]], closes=True)] * 5]
    assert post(client) == TAKEN

    assert post(client) == CLOSED


def test_what_is_said_unasked_is_no_answer(server: Server, client: HttpClient) -> None:
    late = b"HTTP/1.1 408 Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    server.script = [Says([USUAL, late], pause=0.05, closes=True)]
    assert post(client) == TAKEN
    wait_until(lambda: client._kept is not None and not client._kept.usable)

    assert post(client) == TAKEN
    assert server.connections == [1, 2]


def test_bytes_without_a_pause_do_not_make_it_longer(server: Server, client: HttpClient) -> None:
    server.script = [Says(), Says([b"HTTP/1.1 200 OK\r\nX-A: ", *[b"a"] * 4000], pause=0.0005)]
    assert post(client) == TAKEN
    began = time.monotonic()

    assert post(client, read=0.3) == NoReply("no answer within 0.3 s")
    assert time.monotonic() - began < 0.9


def test_more_than_was_announced_is_not_kept(server: Server, client: HttpClient) -> None:
    server.script = [Says(), Says([USUAL + USUAL.replace(b"200", b"404")])]

    assert [post(client) for _ in range(3)] == [TAKEN] * 3
    assert server.connections == [1, 1, 2]


@pytest.mark.parametrize(
    "pieces",
    [
        [b""],
        [b"HTTP/1.1 200 OK\r\n"],
        [USUAL[:-3]],
        [bytes([byte]) for byte in USUAL],
        [b"HTTP/1.1 200 OK\r\n", *[b"X-More: and more\r\n"] * 20],
    ],
    ids=["nothing", "a line", "not all", "a byte at a time", "headers without end"],
)
def test_an_answer_has_so_much_time_all_in_all(
    server: Server, client: HttpClient, pieces: list[bytes]
) -> None:
    server.script = [Says(), Says([*pieces, b""], pause=0.1)]
    assert post(client) == TAKEN
    began = time.monotonic()

    assert post(client, read=0.3) == NoReply("no answer within 0.3 s")

    assert time.monotonic() - began < 1.5
    assert len(server.requests) == 2
    # The answer that was not waited for is not that to the next.
    assert post(client) == TAKEN


def test_a_server_that_does_not_take_the_batch(server: Server, client: HttpClient) -> None:
    server.script = [Says(), Says(deaf=1.0)]
    assert post(client) == TAKEN
    large = b"x" * 30_000_000
    began = time.monotonic()

    outcome = client.post(large, connect=0.3, read=5.0)

    assert outcome == NoReply("it did not take the batch within 0.3 s")
    assert time.monotonic() - began < 1.3
    assert client.post(large, connect=10.0, read=10.0) == TAKEN
    assert server.connections == [1, 2]
    assert [body == large for _, body in server.requests] == [False, True]


@pytest.mark.parametrize(
    "flood", [b"x" * 10**6, b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 10**5], ids=["text", "headers"]
)
def test_a_flood_is_no_answer(server: Server, client: HttpClient, flood: bytes) -> None:
    server.script = [Says(), Says([flood], closes=True), Says([flood], closes=True)]
    assert post(client) == TAKEN

    assert post(client) == CLOSED


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate")
def test_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with context.wrap_socket(socket.create_server(("127.0.0.1", 0)), server_side=True) as listening:
        server = Server(listening, "https", [Says(), Says(), Says(closes=True)])
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        client = HttpClient(server.url, {}, None)

        bodies = [b"batch", b"x" * 300_000, b"last", b"again", b"and again"]
        assert [post(client, body) for body in bodies] == [TAKEN] * 5

        assert [body for _, body in server.requests] == bodies
        assert server.connections == [1, 1, 1, 2, 2]
        client.close()
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_through_a_proxy(server: Server) -> None:
    client = HttpClient("http://far.invalid/in", {}, server.url)

    assert [post(client) for _ in range(3)] == [TAKEN] * 3

    assert server.connections == [1] * 3
    assert {head.split(b"\r\n")[0] for head, _ in server.requests} == {
        b"POST http://far.invalid/in HTTP/1.1"
    }
    client.close()
