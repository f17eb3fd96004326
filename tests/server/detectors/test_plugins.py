"""Detectors of other packages: real distributions in a folder, found by a real server."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import httpx
import numpy as np
import pytest

from rankscope.agent import wire
from tests.support.servers.service import Service, eventually

DOCS = Path(__file__).parents[3] / "docs" / "detector-settings.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(encoding="utf-8"), flags=re.M | re.S)
# The one that the documentation shows, word for word.
SHOWN = next(block for block in BLOCKS if "class TokensPerSecond" in block)

RAISES = """
from rankscope.server.detectors.base import Check, Detector, Outcome, Status

class Raises(Detector):
    kinds = ("acme.raises",)

    def start(self):
        return None

    def advance(self, window, state):
        if window.last_step >= 3:
            raise RuntimeError("a fault of ours")
        return Outcome({"acme.raises": Check(Status.OK, "Fine.")})

class NotStarting(Detector):
    kinds = ("acme.not_starting",)

    def start(self):
        raise RuntimeError("no start")

    def advance(self, window, state):
        raise AssertionError("never called")
"""


def install(folder, name, entry_points, **modules):
    """A distribution as an installer leaves it: a package, and its metadata beside it."""
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for module, text in modules.items():
        (package / f"{module}.py").write_text(textwrap.dedent(text), encoding="utf-8")
    metadata = folder / f"{name}-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    lines = "\n".join(f"{key} = {name}.{value}" for key, value in entry_points.items())
    (metadata / "entry_points.txt").write_text(f"[rankscope.detectors]\n{lines}\n")
    return folder


class WithPackages(Service):
    """A server whose Python finds packages in a folder."""

    def __init__(self, folder, packages):
        super().__init__(folder, environment={"PYTHONPATH": path_with(packages)})


def path_with(packages):
    return os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH", "")]))


def post(service, values, run="otter"):
    steps = np.arange(len(values))
    batch = wire.Batch(
        run=run,
        project="acme",
        rank=0,
        seq=0,
        session="s",
        world_size=1,
        through_step=len(values) - 1,
        state="finished",
        hello=wire.Hello(started_at=0.0),
        columns={
            "tokens_per_second": wire.Column(steps, np.array(values, np.float64)),
            "loss": wire.Column(steps, np.linspace(2, 1, len(values))),
        },
    )
    sent = httpx.post(
        f"{service.url}/api/v1/ingest",
        content=wire.encode(batch),
        headers={"Content-Type": wire.CONTENT_TYPE},
    )
    assert sent.status_code == 200, sent.text
    eventually(lambda: service.run(run)["evaluated_step"] == len(values) - 1, timeout_s=30)


def checks(service, run="otter", **query):
    lines = service.get(f"/runs/{run}/verdict", **query)["checks"]
    return {line["name"]: line for line in lines}


@pytest.mark.e2e
def test_a_package_s_detectors_judge_and_its_faults_stay_its_own(tmp_path):
    packages = tmp_path / "packages"
    install(packages, "acme_tokens", {"tokens": "detectors:TokensPerSecond"}, detectors=SHOWN)
    points = {"raises": "detectors:Raises", "starts": "detectors:NotStarting"}
    install(packages, "acme_faulty", points, detectors=RAISES)
    install(packages, "acme_broken", {"broken": "detectors:Gone"}, detectors="x = 1\n")
    with WithPackages(tmp_path / "server", packages) as service:
        there = service.get("/detectors")
        [about] = [item for item in there["items"] if item["kinds"] == ["acme.tokens"]]
        assert about["origin"] == "acme_tokens 1.2"
        assert about["summary"] == "A rank works through fewer tokens than it should."
        [threshold] = about["thresholds"]
        assert (threshold["name"], threshold["default"]) == ("least", 1000.0)
        assert list(there["failures"]) == ["broken"]
        assert "acme_broken 1.2" in there["failures"]["broken"]

        post(service, [2000, 2000, 500, 2000, 2000, 2000])
        [alert] = [a for a in service.alerts("otter") if a["kind"] == "acme.tokens"]
        assert (alert["ranks"], alert["first_step"]) == ([0], 2)
        found = checks(service)
        assert found["acme.tokens"]["state"] == "failed"
        for kind, fault in {
            "acme.raises": "Raises failed at step 5: RuntimeError('a fault of ours')",
            "acme.not_starting": "NotStarting failed at its start: RuntimeError('no start')",
            "broken": "it could not be loaded: acme_broken.detectors:Gone",
        }.items():
            assert found[kind]["state"] == "not_run"
            assert found[kind]["why"].startswith(f"the detector failed: {fault}")
        # The others went on.
        assert found["loss.nonfinite"]["state"] == "passed"
        assert set(checks(service, kind="acme.tokens")) == {"acme.tokens"}

        # Its thresholds are set like all others.
        url = f"{service.url}/api/v1/projects/acme/detectors"
        wrong = httpx.put(url, json={"detectors": {"acme.tokens": {"most": 1}}})
        assert "acme.tokens: most is no threshold of it; there are least" in wrong.json()["detail"]
        assert httpx.put(url, json={"detectors": {"acme.tokens": {"least": 100}}}).is_success
        post(service, [2000, 2000, 500, 2000], run="heron")
        assert checks(service, run="heron")["acme.tokens"]["state"] == "passed"


REFUSED = {
    "NoDetector": "class NoDetector: kinds = ('acme.x',)",
    "Ours": "class Ours(D): kinds = ('loss.spike',)",
    "NoKind": "class NoKind(D): kinds = ()",
    "Plain": "class Plain(D): kinds = ('spike',)",
    "Stubborn": "class Stubborn(D):\n    kinds = ('acme.y',)\n    def __init__(self): ...",
    "Abstract": "class Abstract(Detector): kinds = ('acme.z',)",
}

LIST = """
import json
from rankscope.server import detectors
there = detectors.installed()
print(json.dumps([list(there.failures.items()), list(there.origins), len(there.detectors)]))
"""


def test_what_is_no_detector_is_left_out_with_the_reason(tmp_path):
    base = """
from rankscope.server.detectors.base import Detector
class D(Detector):
    def start(self): return None
    def advance(self, window, state): raise AssertionError
"""
    module = base + "\n".join(REFUSED.values()) + "\nclass Good(D): kinds = ('acme.good',)\n"
    points = {name.lower(): f"detectors:{name}" for name in (*REFUSED, "Good")}
    install(tmp_path, "acme", points, detectors=module)
    printed = subprocess.run(
        [sys.executable, "-c", LIST],
        env={**os.environ, "PYTHONPATH": path_with(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    failures, origins, _ = json.loads(printed)
    reported = dict(failures)
    assert origins == ["acme.good"]
    assert "is no subclass" in reported["nodetector"]
    assert "loss.spike is taken" in reported["ours"]
    assert "declares no kind" in reported["nokind"]
    assert "'spike' is no name like group.what" in reported["plain"]
    assert "__init__() takes 1 positional argument" in reported["stubborn"]
    assert "abstract" in reported["abstract"]
