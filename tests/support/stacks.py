"""Runs a stack's job with the stack's own launcher, and holds what the server says against it."""

from __future__ import annotations

import ast
import json
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.lab.faults.case import Expected
from tests.lab.faults.rest import Server
from tests.lab.faults.score import Score, score

REPOSITORY = Path(__file__).parent.parent.parent
STACKS = REPOSITORY / "tests" / "stacks"
# `make test-stacks` makes it; another one may be named.
ENVIRONMENT = Path(os.environ.get("STACKS_VENV", REPOSITORY / ".venv-stacks"))
_JUDGE_SECONDS = 60.0
# Where `make test-stacks` has the results written that the table of the documentation is made of.
_RESULTS = os.environ.get("STACKS_RESULTS")
_COMPARED = ("start", "batch", "local_gradient", "reduced_gradient", "parameters")
_COMPARED += ("optimizer_state", "hyperparameters")
_LAUNCHERS = {
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node={world}"),
    "horovodrun": ("horovodrun", "-np", "{world}", "--gloo", "python"),
    "python": ("python",),
    "torchft": ("python", str(STACKS / "replica_groups.py"), "{world}"),
    "torchrun, a node leaves": ("python", str(STACKS / "elastic.py"), "leaves"),
    "torchrun, a node joins": ("python", str(STACKS / "elastic.py"), "joins"),
    "Ray Train": ("python", str(STACKS / "in_ray.py"), "{world}"),
    "TF_CONFIG": ("python", str(STACKS / "cluster.py"), "{world}"),
    "TF_CONFIG, coordinated": ("python", str(STACKS / "cluster.py"), "{world}", "--coordinated"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One way of training, as its job file declares it in literals at its top.

    Attributes:
        name: of the file.
        launch: a key of the launchers.
        world: number of ranks.
        needs: packages that only the environment of the stacks has.
        gaps: cases that are not reported rightly yet, and why.
    """

    name: str
    launch: str
    world: int
    needs: tuple[str, ...]
    gaps: dict[str, str]

    @property
    def separate(self) -> list[Path]:
        """Folders of packages that the other stacks are not to find: they search for them."""
        return [ENVIRONMENT / "apart" / name for name in self.needs]

    @property
    def bin(self) -> Path:
        """Folder of its interpreter and launcher."""
        return ENVIRONMENT / "bin" if self.needs else Path(sys.executable).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One case of a stack.

    Attributes:
        alert: the one that was judged.
        roots: all root alerts, in short.
        seen: names of the series and stages of the fingerprints that arrived.
    """

    case: str
    what: str
    expected: Expected
    run: str
    score: Score
    alert: dict[str, Any] | None
    roots: tuple[str, ...]
    seen: tuple[str, ...]
    state: str

    @property
    def complaint(self) -> str:
        """What is not as it should be; empty where all is."""
        if self.state != "finished":
            return f"{self.case}: the run is {self.state or 'not judged in time'}"
        if self.expected.kinds:
            good = self.score.right and self.score.onset and not self.score.extra
        else:
            good = not self.score.false_alarms
        return "" if good else f"{self.case}: {self.score} of {self.roots}, not {self.expected}"


def stacks() -> list[Stack]:
    """All of them; their files are read and not imported: their packages are not all here."""
    return [_declared(path) for path in sorted((STACKS / "jobs").glob("*.py"))]


def run(stack: Stack, server: str, folder: Path, *, only: str = "", timeout: float = 400.0) -> str:
    """Trains all cases of a stack.

    Returns:
        What its processes printed.

    Raises:
        AssertionError: the job failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "server": server,
        "seed": 0,
        "only": only,
        "folder": str(folder),
        "prefix": f"{stack.name}-{secrets.token_hex(3)}".replace("_", "-"),
    }
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    launcher, *options = (part.format(world=stack.world) for part in _LAUNCHERS[stack.launch])
    started = subprocess.Popen(
        [
            *(stack.bin / launcher, *options),
            *(STACKS / "rank.py", stack.name, folder / "facts.json"),
        ],
        env={
            **os.environ,
            "PATH": f"{stack.bin}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, *stack.separate))),
            "RANKSCOPE_SPOOL": str(folder / "spool"),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        },
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = started.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        printed = _ended(started)
        raise AssertionError(f"not done after {timeout:.0f} s: {printed[-6000:]}") from None
    assert started.returncode == 0, printed[-6000:]
    return printed


def _ended(launcher: subprocess.Popen[str]) -> str:
    """Ends a launcher, which ends its ranks (some are in other sessions); what they printed."""
    os.killpg(launcher.pid, signal.SIGTERM)
    try:
        return launcher.communicate(timeout=30)[0]
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        return launcher.communicate()[0]


def judged(server: str, folder: Path) -> list[Judged]:
    """What the server says of every case that was trained."""
    asked = Server(server)
    found = []
    for record in json.loads((folder / "cases.json").read_text(encoding="utf-8")):
        plain = record["expected"]
        expected = Expected(
            **{
                **plain,
                "kinds": tuple(plain["kinds"]),
                "stages": tuple(plain["stages"]),
                "ranks": tuple(frozenset(ranks) for ranks in plain["ranks"]),
                "tensors": None if plain["tensors"] is None else frozenset(plain["tensors"]),
            }
        )
        state = asked.judged(record["run"], timeout=_JUDGE_SECONDS, settle=0.0)
        roots = asked.alerts(record["run"])
        scored, alert = score(expected, roots, slack=0)
        found.append(
            Judged(
                case=record["case"],
                what=record["what"],
                expected=expected,
                run=record["run"],
                score=scored,
                alert=alert,
                roots=tuple(_short(root) for root in roots),
                seen=tuple(_seen(server, record["run"])),
                state=state,
            )
        )
    return found


def keep(stack: Stack, cases: list[Judged]) -> None:
    """Writes the results of a stack, where they are wanted."""
    if _RESULTS is None:
        return
    path = Path(_RESULTS)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[stack.name] = {
        "what": ast.get_docstring(ast.parse((STACKS / "jobs" / f"{stack.name}.py").read_text())),
        "launch": stack.launch,
        "ranks": stack.world,
        "seen": list(next(case.seen for case in cases if not case.expected.kinds)),
        "cases": {case.case: {"what": case.what, "right": not case.complaint} for case in cases},
        "gaps": stack.gaps,
    }
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")


def _seen(server: str, run: str) -> list[str]:
    root = f"{server}/api/v1/runs/{run}"
    with httpx.Client(timeout=30) as client:
        series = [item["name"] for item in client.get(f"{root}/metrics").json()["items"]]
        compared = [
            stage
            for stage in _COMPARED
            if client.get(f"{root}/divergence", params={"stage": stage, "limit": 1}).json()["items"]
        ]
    return sorted({name for name in series if "/" not in name} | set(compared))


def _short(alert: dict[str, Any]) -> str:
    return (
        f"{alert['severity']} {alert['kind']} stage {alert['stage']} ranks {alert['ranks']} "
        f"step {alert['first_step']} tensors {alert['tensors'][:3]}"
    )


def _declared(path: Path) -> Stack:
    literals: dict[str, Any] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if node.targets[0].id in ("LAUNCH", "WORLD", "NEEDS", "GAPS"):
                literals[node.targets[0].id] = ast.literal_eval(node.value)
    return Stack(
        name=path.stem,
        launch=literals["LAUNCH"],
        world=literals["WORLD"],
        needs=literals.get("NEEDS", ()),
        gaps=literals.get("GAPS", {}),
    )
