"""`rankscope show` and `rankscope watch`: real processes of the command against a real server."""

import json
import os
import pty
import signal
import subprocess
import threading
import time

import httpx
import pytest

from rankscope.server.commands.client import Server
from rankscope.server.commands.run_facts import load
from rankscope.server.commands.terminal import mean_loss, sparkline
from rankscope.server.commands.watch import _changes
from rankscope.server.demo.processes import RANKSCOPE
from tests.support.runs.fixture_run import HOSTILE, SyntheticRun, post, wait_until_evaluated
from tests.support.servers.service import Service, eventually

BROKEN = SyntheticRun(run="broken", ranks=20, steps=200, desync=(17, 37), buckets=4)
HEALTHY = SyntheticRun(run="healthy", ranks=2, steps=120)
MARKUP = SyntheticRun(run=HOSTILE, ranks=2, steps=60, hostile=True, told=True, project="[red]x")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        for run in (BROKEN, HEALTHY, MARKUP):
            post(service.url, run)
        for run in (BROKEN, HEALTHY, MARKUP):
            wait_until_evaluated(service.url, run)
        yield service


def rankscope(service, *arguments, columns="100", **environment):
    return subprocess.run(
        [*RANKSCOPE, *arguments, "--server", service.url],
        env={**os.environ, "COLUMNS": columns, "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=60,
    )


def test_a_run_is_shown_with_its_headline_ranks_and_alerts(service):
    done = rankscope(service, "show", "broken")
    assert done.returncode == 0, done.stderr
    [alert] = [a for a in service.alerts("broken") if a["kind"].startswith("desync")]
    flat = " ".join(done.stdout.split())
    assert flat.startswith(f"Critical problem {alert['title']}")
    assert "rank 17" in flat
    # The suspect comes first, though there are more ranks than are listed.
    first, second = [line for line in done.stdout.splitlines() if "finished" in line][1:3]
    assert first.split()[0] == "17"
    assert "finished, suspect" in first
    assert second.split()[0] == "0"
    assert "suspect" not in second
    assert "and 4 more ranks" in flat
    assert f"CRITICAL {alert['kind']}" in flat
    assert "Verdict: fail" in flat
    # Piped: no colour, and nothing else that only a terminal understands.
    assert "\x1b" not in done.stdout
    loss = next(line for line in done.stdout.splitlines() if set("▁▂▃▄▅▆▇█") & set(line))
    assert loss[0] == "█"
    assert len(loss) <= 100


@pytest.mark.parametrize("columns", ["40", "120"])
@pytest.mark.parametrize("run", ["broken", HOSTILE])
def test_it_fits_the_terminal(service, run, columns):
    done = rankscope(service, "show", run, columns=columns)
    assert done.returncode == 0, done.stderr
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= int(columns)
    if run == HOSTILE:
        assert "<b>bold" in " ".join(done.stdout.split())
        assert "[red]x" in done.stdout


def test_a_terminal_that_knows_ascii_alone(service):
    done = rankscope(service, "show", "healthy", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    done.stdout.encode("ascii")
    assert any(set(line) <= set(".:-=+*%#") and len(line) > 20 for line in done.stdout.split())


def test_show_as_json_has_all_of_it(service):
    found = json.loads(rankscope(service, "show", "broken", "--json").stdout)
    assert found["run"] == service.get("/runs/broken")
    assert found["verdict"] == service.get("/runs/broken/verdict")
    assert {a["id"] for a in found["alerts"]} >= {a["id"] for a in service.alerts("broken")}
    assert len(found["loss"]) == 20


@pytest.mark.parametrize("command", ["show", "watch"])
def test_a_run_that_is_not_there(service, command):
    done = rankscope(service, command, "nobody")
    assert done.returncode == 4
    assert "there is no run 'nobody'" in done.stderr


def test_a_silenced_critical_alert_is_not_fine(service):
    said = {"name": "Ada", "reason": "known", "seconds": 7200}
    silences = "/api/v1/runs/broken/silences"
    kinds = {a["kind"] for a in service.alerts("broken")} | {"desync.parameters"}
    held = [
        httpx.post(f"{service.url}{silences}", json={**said, "kind": kind}).json()["id"]
        for kind in sorted(kinds)
    ]
    flat = " ".join(rankscope(service, "show", "broken").stdout.split())
    for silence in held:
        httpx.delete(f"{service.url}/api/v1/silences/{silence}").raise_for_status()
    assert flat.startswith("Silenced, not solved 1 critical problem, silenced by Ada until 2")
    assert "(known)" in flat


def test_watch_reports_alerts_as_they_open_and_ends_with_the_run(service):
    run = SyntheticRun(run="living", ranks=2, steps=200, state="running", desync=(1, 120))
    post(service.url, run, 0, 100)
    watching = subprocess.Popen(
        [*RANKSCOPE, "watch", "living", "--server", service.url],
        env={**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = []
    reading = threading.Thread(target=lambda: lines.extend(iter(watching.stdout.readline, "")))
    reading.start()
    post(service.url, run, 100, 160)
    eventually(lambda: any("desync" in line for line in lines), timeout_s=60)
    assert watching.poll() is None
    ended = SyntheticRun(run="living", ranks=2, steps=200, desync=(1, 120))
    post(service.url, ended, 160, 200)
    assert watching.wait(60) == 0, watching.stderr.read()
    reading.join()
    text = "".join(lines)
    assert "living (digits): finished, 2 of 2 ranks, step 199" in text
    assert "Verdict: fail" in text
    watching.stderr.close()
    watching.stdout.close()


def test_watch_draws_in_a_terminal_and_control_c_ends_it_cleanly(service):
    post(service.url, SyntheticRun(run="endless", ranks=2, steps=400, state="running"), 0, 50)
    master, slave = pty.openpty()
    watching = subprocess.Popen(
        [*RANKSCOPE, "watch", "endless", "--server", service.url],
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    seen = bytearray()

    def read():
        # Linux answers EIO once nobody has the other end.
        try:
            while part := os.read(master, 65536):
                seen.extend(part)
        except OSError:
            pass

    reading = threading.Thread(target=read)
    reading.start()
    eventually(lambda: b"step 49" in seen, timeout_s=60)
    post(service.url, SyntheticRun(run="endless", ranks=2, steps=400, state="running"), 50, 90)
    eventually(lambda: b"step 89" in seen, timeout_s=60)
    time.sleep(0.2)
    watching.send_signal(signal.SIGINT)
    assert watching.wait(30) == 130
    reading.join()
    os.close(master)
    assert b"Traceback" not in seen
    assert b"\x1b[" in seen
    # The cursor is shown again.
    assert seen.rfind(b"\x1b[?25h") > seen.rfind(b"\x1b[?25l")


def test_an_interrupt_that_got_lost_still_ends_it(service):
    post(service.url, SyntheticRun(run="lost", ranks=2, steps=400, state="running"), 0, 50)
    server = Server(service.url)
    interrupted = threading.Event()
    interrupted.set()
    changes = _changes(server, "lost", load(server, "lost"), interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(changes)


def test_a_sparkline_spans_from_the_smallest_to_the_largest():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], width=20) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, float("nan"), 1], width=3) == "▁!▁"
    assert sparkline([float("inf")] * 3, width=2) == "!!"
    assert sparkline(range(1000), width=10, plain=True)[::9] == ".#"
    assert len(sparkline(range(1001), width=77)) == 77
    assert sparkline([], width=5) == ""


def test_the_mean_is_of_steps_that_all_ranks_have():
    series = [
        {"steps": [0, 1, 2], "values": [1.0, "NaN", 3.0]},
        {"steps": [0, 2], "values": [3.0, 5.0]},
    ]
    assert mean_loss(series) == [(0, 2.0), (2, 4.0)]
