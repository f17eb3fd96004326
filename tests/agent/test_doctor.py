"""`rankscope doctor`: of a machine where all works, and of each thing that does not."""

import json
import socket
import subprocess
import threading
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from time import time

import pytest

from rankscope.agent import doctor
from rankscope.agent.delivery.spool import SpoolFolder, folder_of
from rankscope.agent.fingerprint import kernel
from rankscope.server.demo.processes import RANKSCOPE
from tests.support.servers.service import Service


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        yield service.url


@contextmanager
def answering(body, *, status=200, date=None, posts=400):
    """Address of a server that gives one answer to everything that is asked of it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response_only(status)
            self.send_header("Date", date or self.date_time_string())
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            self.send_response_only(posts)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    made = HTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        yield f"http://127.0.0.1:{made.server_port}"
    finally:
        made.shutdown()
        serving.join()
        made.server_close()


def examined(server, spool, **environ):
    asked = {"server": server, "spool": str(spool)}
    return {line.name: line for line in doctor.examine(asked, environ)}


def test_where_all_works_the_command_says_so(server, tmp_path):
    command = [*RANKSCOPE, "doctor", "--server", server, "--spool", tmp_path / "spool"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("is ready", "can be written to", "within 5 s of the server's", "All works here"):
        assert said in done.stdout
    # Nothing is left behind where nothing was.
    assert not (tmp_path / "spool").exists()
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert found["healthy"] is True
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert states["server"] == states["spool"] == states["clock"] == states["torch"] == "ok"
    assert {"rankscope", "python", "packages", "launcher", "sampled", "measured"} <= set(states)


def test_a_server_that_is_not_there_is_a_failure(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    line = examined(address, tmp_path)["server"]
    assert line.state == "failed"
    assert "does not answer" in line.text
    assert "rankscope serve" in line.remedy
    command = [*RANKSCOPE, "doctor", "--server", address, "--spool", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "1 thing does not work" in done.stdout


@pytest.mark.parametrize(("status", "states"), [(401, "failed"), (403, "failed"), (400, None)])
def test_batches_are_refused_without_the_right_token(tmp_path, status, states):
    with answering(b'{"status": "ready"}', posts=status) as address:
        line = examined(address, tmp_path).get("token")
    assert (line and line.state) == states
    if line:
        assert "takes no batches without a token" in line.text
        assert "RANKSCOPE_TOKEN" in line.remedy


def test_something_else_than_a_ready_server_is_a_failure(tmp_path):
    with answering(b"<html>") as address:
        line = examined(address, tmp_path)["server"]
    assert (line.state, "something else" in line.text) == ("failed", True)
    problem = json.dumps({"title": "x", "status": 503, "detail": "schema 1, not 2"}).encode()
    with answering(problem, status=503) as address:
        line = examined(address, tmp_path)["server"]
    assert (line.state, "not ready: schema 1, not 2" in line.text) == ("failed", True)


@pytest.mark.parametrize(
    ("ahead", "state", "said"),
    [(0, "ok", "within"), (90, "warning", "s behind the server"), (-90, "warning", "s ahead of")],
)
def test_the_clock_is_compared_with_the_server_s(tmp_path, ahead, state, said):
    date = formatdate(time() + ahead, usegmt=True)
    with answering(b'{"status": "ready"}', date=date) as address:
        line = examined(address, tmp_path)["clock"]
    assert line.state == state
    assert said in line.text
    if ahead:
        assert 85 <= int(line.text.split()[0]) <= 91


def test_a_spool_that_cannot_be_written_to_and_one_in_which_batches_wait(server, tmp_path):
    (tmp_path / "file").write_text("")
    assert examined(server, tmp_path / "file" / "spool")["spool"].state == "failed"
    files = SpoolFolder(folder_of(tmp_path, "otter", 0, "session"))
    assert files.acquire()
    files.write(0, b"x" * 1000)
    files.write(1, b"x" * 1000)
    line = examined(server, tmp_path)["waiting batches"]
    files.close()
    assert line.state == "warning"
    assert line.text.startswith("2 batches, 0.0 MB, of 1 process")
    assert "rankscope sync" in line.remedy


def test_options_that_cannot_work_are_a_failure(tmp_path):
    lines = examined("nowhere", tmp_path)
    assert lines["options"].state == "failed"
    assert "is no URL of a server" in lines["options"].text
    assert "server" not in lines
    lines = examined(None, tmp_path, RANKSCOPE_MODE="offline")
    assert lines["server"].state == "info"
    assert "attach does nothing" in examined(None, tmp_path, RANKSCOPE_MODE="disabled")["mode"].text


def test_what_will_be_measured(server, tmp_path):
    told = {"RANK": "3", "WORLD_SIZE": "8", "CI": "true", "RANKSCOPE_TOKEN": "secret"}
    lines = examined(server, tmp_path, **told)
    assert "rank 3 of 8" in lines["launcher"].text
    assert lines["sampled"].text.startswith("every step in full;")
    assert "secret" not in str(lines)
    assert "10 s" in examined(server, tmp_path)["sampled"].text
    assert "loss" in lines["measured"].text


def test_the_kernel_in_use_is_named(server, tmp_path, monkeypatch):
    expected = "ok" if kernel.load() is not None else "warning"
    assert examined(server, tmp_path)["fingerprint kernel"].state == expected
    monkeypatch.setattr(kernel, "load", lambda: None)
    line = examined(server, tmp_path)["fingerprint kernel"]
    assert (line.state, line.text.startswith("numpy")) == ("warning", True)


def test_a_spool_that_cannot_be_looked_at(tmp_path):
    lines = examined("http://127.0.0.1:9", tmp_path / ("x" * 300) / "spool")
    assert lines["options"].state == doctor.FAILED
    assert "too long" in lines["options"].text


def test_a_process_that_ends_meanwhile_has_nothing_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "folders_below", lambda folder: [folder / "gone"])
    assert examined("http://127.0.0.1:9", tmp_path)["waiting batches"].text == "none"
