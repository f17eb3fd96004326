"""The evaluation beside a server, in a process of its own: nobody notices when it dies."""

import signal

import httpx
import psutil
import pytest

from rankscope.agent.wire import codec
from rankscope.server.demo.processes import RANKSCOPE, Process, free_port
from tests.support.runs.fixture_run import SyntheticRun
from tests.support.servers.service import eventually

pytestmark = pytest.mark.e2e


class Server:
    """`rankscope serve` on a database of its own."""

    def __init__(self, folder):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [*RANKSCOPE, "serve", "--port", str(port), "--db", f"sqlite:///{folder}/own.db"]
        self.process = Process(command, log=folder / "server.log")

    def ready(self):
        assert self.process.exit_code is None, self.process.tail(40)
        try:
            return httpx.get(f"{self.url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def evaluating(self):
        """Its process that evaluates, once there is one."""
        children = psutil.Process(self.process.pid).children()
        return next((c for c in children if "spawn_main" in " ".join(c.cmdline())), None)

    def post(self, batches):
        for batch in batches:
            httpx.post(
                f"{self.url}/api/v1/ingest",
                content=codec.encode(batch),
                headers={"Content-Type": codec.CONTENT_TYPE},
            ).raise_for_status()

    def alerts(self, run):
        path = f"{self.url}/api/v1/runs/{run}/alerts"
        return httpx.get(path, params={"limit": 100, "consequences": True}).json()["items"]


@pytest.fixture
def server(tmp_path):
    made = Server(tmp_path)
    try:
        eventually(made.ready, timeout_s=60)
        eventually(made.evaluating, timeout_s=20)
        yield made
    finally:
        made.process.kill()


def test_alerts_go_on_when_the_evaluation_is_killed(server):
    run = SyntheticRun(run="job", ranks=4, steps=300, desync=(2, 200), spike=(0, 60), seed=3)
    batches = list(run.batches(size=5))
    half = len(batches) // 2
    server.post(batches[:half])
    eventually(lambda: server.alerts("job"), timeout_s=30)
    before = server.alerts("job")

    first = server.evaluating()
    first.kill()
    server.post(batches[half:])

    def desynced():
        return [a for a in server.alerts("job") if a["kind"] == "desync.gradients"]

    (alert,) = eventually(desynced, timeout_s=60)
    assert (alert["first_step"], alert["ranks"]) == (200, [2])
    assert server.evaluating().pid != first.pid
    after = server.alerts("job")
    assert {a["id"] for a in before} <= {a["id"] for a in after}
    assert len({(a["kind"], a["first_step"], *a["ranks"]) for a in after}) == len(after)
    assert "another one takes its place" in server.process.tail(40)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_the_server(server, end):
    evaluating = server.evaluating()
    psutil.Process(server.process.pid).send_signal(end)
    eventually(lambda: server.process.exit_code is not None, timeout_s=30)
    evaluating.wait(30)
    assert "Traceback" not in server.process.tail(40)


def test_asked_to_end_by_itself_it_keeps_what_it_knows(server):
    run = SyntheticRun(run="job", ranks=2, steps=100, seed=1)
    server.post(run.batches(size=5))

    def evaluated():
        return "rankscope_unevaluated_runs 0" in httpx.get(f"{server.url}/metrics").text

    eventually(evaluated, timeout_s=30)
    first = server.evaluating()
    first.terminate()
    assert first.wait(20) in (0, None)
    eventually(lambda: (server.evaluating() or first).pid != first.pid, timeout_s=30)


def test_a_server_without_its_evaluation_is_not_ready(server):
    server.evaluating().kill()

    def missed():
        answer = httpx.get(f"{server.url}/readyz")
        return answer.status_code == 503 and answer.json()

    problem = eventually(missed, timeout_s=30)
    assert problem["missing"] == ["evaluation"]
    eventually(server.ready, timeout_s=60)
    metrics = httpx.get(f"{server.url}/metrics").text
    assert "rankscope_background_restarts_total 1\n" in metrics
