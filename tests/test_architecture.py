"""Rules between and inside the packages that keep the design true.

Who may import whom is said in pyproject.toml and checked by import-linter (`make check`); here it
is run once more, with what import-linter cannot say.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.server.detectors.registry import classes

REPOSITORY = Path(__file__).parent.parent
PACKAGES = ("agent", "client", "server", "dashboard", "migrations")

# Calls that make the training thread wait for the device, or the ranks for each other (design,
# sections 1 and 5), and what is right about the few that there are: path, source -> reason.
WAITING = {"item", "cpu", "synchronize"}
COLLECTIVES = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "full_tensor",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "safe_get_full_grad",
    "scatter_object_list",
    "send_object_list",
}
NAMED_WAITING = {
    ("agent/model/tensors.py", "tensor.item()"): "on a CPU alone",
    # Each behind a check of where the tensor is.
    ("agent/probes/loss/classification.py", "tensor.item()"): "on a CPU alone",
    ("agent/probes/loss/evaluation.py", "tensor.item()"): "on a CPU alone",
    ("agent/probes/loss/sources.py", "plain.item()"): "on a CPU alone",
    ("agent/probes/loss/sources.py", "tensors.item()"): "on a CPU alone",
    ("agent/probes/loss/scaling.py", "tensor.item()"): "on a CPU alone",
    ("agent/probes/loss/scaling.py", "other.item()"): "on a CPU alone",
    ("agent/probes/loss/scaling.py", "given.item()"): "on a CPU alone",
    ("agent/probes/loss/scaling.py", "total.item()"): "on a CPU alone",
    (
        "agent/probes/numbers_in_transit.py",
        "self._event.synchronize()",
    ): "what has been waited for by `ready`",
    (
        "agent/steps/readout.py",
        "self._event.synchronize()",
    ): "at the end of the run, after the last step",
    # `Pending.result`, which may wait; `begin` and `ready` do not.
    ("agent/fingerprint/device.py", "self.copied.synchronize()"): "the results of a CUDA device",
    ("agent/fingerprint/device.py", "self.values.cpu()"): "of a device that is not CUDA",
}
NAMED_COLLECTIVES = {
    (
        "agent/delivery/process_exit.py",
        "reader.recv(64)",
    ): "a socket between two threads of one process",
    ("agent/delivery/http.py", "sock.recv(LARGEST_ANSWER)"): "the sender thread, for the server",
    (
        "agent/delivery/uploader.py",
        "wake_up.recv(_WAKE_UP_BYTES)",
    ): "the sender thread, for its process",
    ("agent/delivery/uploader.py", "connection.recv(1)"): "does not wait",
    (
        "agent/delivery/uploader.py",
        "connection.recv(_RECEIVED_BYTES)",
    ): "the sender thread, for its process",
}

# Kinds of another family than that of the class which finds them, beside the kind it lives by: both
# are read off the same values, and one set of thresholds holds for both.
FOUND_BESIDE = {"weights.unscaled": "data.unscaled", "collective.slow": "rank.straggler"}

# What lies in `server/detectors` itself: how detectors are declared, found, set and run.
FRAMEWORK = {
    "__init__",
    "base",
    "effects",
    "plugins",
    "policy",
    "profiles",
    "reach",
    "registry",
    "runner",
    "settings",
    "tasks",
}

HEAVY = {
    "alembic",
    "fastapi",
    "jinja2",
    "plotly",
    "pydantic",
    "sqlalchemy",
    "starlette",
    "uvicorn",
}


def modules(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Path in the repository and syntax tree of each module."""
    for folder in folders:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            name = path.relative_to(REPOSITORY).as_posix()
            yield name, ast.parse(path.read_text(encoding="utf-8"), filename=name)


def calls_of_methods(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Last name and node of every call of an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr, node


def fresh_interpreter(program: str, *options: str) -> str:
    """What a new interpreter prints for a program."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *options, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_who_imports_whom():
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wire_imports_nothing_of_ours():
    for name, tree in modules("agent/wire"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [node.module or ""]
                assert node.level == 0, f"{name}:{node.lineno}: imports are absolute"
            else:
                continue
            for module in imported:
                ours = module.partition(".")[0] == "rankscope"
                assert not ours or module.startswith("rankscope.agent.wire"), (
                    f"{name}:{node.lineno} imports {module}"
                )


@pytest.mark.parametrize(
    ("methods", "named"),
    [(WAITING, NAMED_WAITING), (COLLECTIVES, NAMED_COLLECTIVES)],
    ids=["device", "ranks"],
)
def test_the_agent_waits_neither_for_the_device_nor_for_other_ranks(methods, named):
    found = {
        (name, ast.unparse(node))
        for name, tree in modules("agent")
        # The wire has arrays of numpy and knows no device; checkpoints are read by a command of its
        # own, in no trainer (a contract of import-linter).
        if not name.startswith(("agent/wire/", "agent/checkpoints/"))
        for method, node in calls_of_methods(tree)
        if method in methods
    }
    assert found - set(named) == set()
    assert set(named) - found == set(), "a named line is no longer there: take it off the list"


def test_what_is_pure_has_no_clock_and_no_chance():
    pure = (
        *("server/detectors", "server/alerts", "server/comparison", "server/window"),
        "agent/wire",
    )
    files = ["agent/schedule.py"]
    for name, tree in modules(*pure, *{str(Path(f).parent) for f in files}):
        if not name.startswith(pure) and name not in files:
            continue
        for method, node in calls_of_methods(tree):
            assert method not in {"now", "utcnow", "today", "perf_counter", "monotonic"}, (
                f"{name}:{node.lineno}: {ast.unparse(node)}"
            )
        for node in ast.walk(tree):
            imported = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"time", "random", "secrets", "datetime"} & set(imported), name


def test_broad_excepts_stand_where_faults_are_contained():
    """Elsewhere ruff's BLE forbids them; here, that nobody silences it in passing."""
    allowed = {"agent/guard.py", "server/evaluation/worker.py"}
    for folder in PACKAGES:
        for path in (REPOSITORY / folder).rglob("*.py"):
            name = path.relative_to(REPOSITORY).as_posix()
            silenced = "noqa: BLE" in path.read_text(encoding="utf-8")
            assert not silenced or name in allowed, name


def test_no_module_is_a_drawer():
    for folder in PACKAGES:
        for path in (REPOSITORY / folder).rglob("*.py"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            assert lines < 600, f"{path.name} has {lines} lines: split it"
            assert path.stem not in {"utils", "util", "helpers", "misc", "common"}, path


def test_a_kind_is_declared_where_its_name_says():
    """`a.b` in detectors/a/b.py; several kinds of a family that one class finds in detectors/a/."""
    for detector in classes():
        place = detector.__module__.removeprefix("rankscope.server.detectors.")
        beside = set(detector.kinds) & FOUND_BESIDE.keys()
        assert {FOUND_BESIDE[kind] for kind in beside} <= set(detector.kinds), detector
        kinds = sorted(set(detector.kinds) - beside)
        if len(kinds) == 1:
            assert [place] == kinds
        else:
            families = {kind.partition(".")[0] for kind in kinds}
            assert {place.partition(".")[0]} == families, f"{place} declares {kinds}"


def test_mechanisms_declare_no_kind():
    declaring = {d.__module__ for d in classes()}
    assert not [m for m in declaring if m.startswith("rankscope.server.detectors.mechanisms.")]
    framework = {p.stem for p in (REPOSITORY / "server/detectors").glob("*.py")}
    assert framework == FRAMEWORK, "a family's module, or a mechanism, has a folder"


def test_the_server_reads_the_wire_without_torch():
    loaded = fresh_interpreter(
        "import sys, rankscope.agent.wire; print('torch' in sys.modules)",
    )
    assert loaded.strip() == "False"


def test_the_trainer_loads_nothing_of_the_server():
    loaded = fresh_interpreter(
        "import sys; from rankscope import agent; agent.attach;"
        f"print(sorted({HEAVY!r} & {{m.partition('.')[0] for m in sys.modules}}),"
        " [m for m in sys.modules if m.startswith('rankscope.server')])",
    )
    assert loaded.strip() == "[] []"


def test_importing_the_agent_alone_does_not_load_torch():
    loaded = fresh_interpreter("import sys, rankscope.agent; print('torch' in sys.modules)")
    assert loaded.strip() == "False"


def test_the_server_runs_without_torch():
    """The application with all its routes, in an interpreter that refuses to import torch."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import rankscope.server.app, rankscope.server.evaluation.worker, rankscope.agent.cli\n"
        "print('fine')"
    )
    assert fresh_interpreter(program).strip() == "fine"


def test_the_folders_are_no_packages_of_their_own():
    """A second copy of a module under its short name would hold a second state (style, B4.2)."""
    for folder in PACKAGES:
        assert folder not in sys.modules
    program = (
        f"import importlib.util\nprint([f for f in {PACKAGES!r} if importlib.util.find_spec(f)])"
    )
    assert fresh_interpreter(program, "-P").strip() == "[]"


def test_a_stranger_s_agent_module_does_no_harm(tmp_path):
    """Many trainers have an `agent.py` of their own; ours must not be mistaken for it."""
    (tmp_path / "agent.py").write_text("raise RuntimeError('the wrong agent')")
    (tmp_path / "server.py").write_text("raise RuntimeError('the wrong server')")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + (
        "from rankscope import agent; print(callable(agent.attach))"
    )
    assert fresh_interpreter(program).strip() == "True"
