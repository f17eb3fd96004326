"""The names that users and their scripts rely on, spelled out once more, apart from the code.

A test here that fails means: a script written against Rankscope would break.
"""

import os
import re
import subprocess
import sys

import pytest

from rankscope import client
from rankscope.agent import wire
from rankscope.agent.cli import COMMANDS
from rankscope.agent.options import OPTIONS, default_spool
from rankscope.server.app import create_app
from rankscope.server.detectors import registry
from rankscope.server.settings import Settings

KINDS = """
    desync.parameters desync.gradients desync.optimizer desync.hyperparameters desync.buffers
    desync.progress desync.config
    reduction.wrong
    update.missing schedule.mismatch
    data.duplicated data.overlap data.replayed data.unshuffled data.imbalanced data.outlier
    loss.nonfinite loss.spike loss.diverging loss.oscillating loss.plateau accuracy.stalled
    generalization.gap
    gradient.nonfinite gradient.exploding gradient.vanishing gradient.oscillating
    gradient.accumulating layer.dead update.ratio clipping.saturated amp.scale_collapse
    compression.error
    lr.too_high lr.too_low batch.noise
    rank.loss_outlier rank.gradient_outlier rank.straggler rank.silent rank.stalled rank.starved
""".split()

# Option of `attach` -> variable, default.
OPTION_TABLE = {
    "server": ("RANKSCOPE_SERVER", "http://127.0.0.1:8642"),
    "token": ("RANKSCOPE_TOKEN", None),
    "project": ("RANKSCOPE_PROJECT", "default"),
    "run": ("RANKSCOPE_RUN", None),
    "mode": ("RANKSCOPE_MODE", "online"),
    "spool": ("RANKSCOPE_SPOOL", default_spool),
    "overhead": ("RANKSCOPE_OVERHEAD", 0.01),
    "allowance": ("RANKSCOPE_ALLOWANCE", 10),
    "tensorboard": ("RANKSCOPE_TENSORBOARD", None),
    # What has come since.
    "console": ("RANKSCOPE_CONSOLE", 0),
    "git_diff": ("RANKSCOPE_GIT_DIFF", False),
    "tags": ("RANKSCOPE_TAGS", ()),
}

ROUTES = """
    POST /api/v1/ingest
    GET /api/v1/runs
    GET /api/v1/runs/{run}
    GET /api/v1/runs/{run}/metrics
    GET /api/v1/runs/{run}/series
    GET /api/v1/runs/{run}/divergence
    GET /api/v1/runs/{run}/alerts
    GET /api/v1/alerts
    GET /api/v1/alerts/{id}
    POST /api/v1/alerts/{id}/acknowledge
    POST /api/v1/runs/{run}/silences
    GET /api/v1/runs/{run}/silences
    DELETE /api/v1/silences/{id}
    DELETE /api/v1/alerts/{id}/acknowledge
    GET /api/v1/runs/{run}/verdict
    GET /api/v1/runs/{run}/stream
    GET /healthz
    GET /readyz
    GET /metrics
""".split("\n")[1:-1]
# What has come since.
FURTHER_ROUTES = """
    DELETE /api/v1/runs/{run}
    PUT /api/v1/runs/{run}/baseline
    DELETE /api/v1/runs/{run}/baseline
    GET /api/v1/alerts/{id}/context
    GET /api/v1/compare
    GET /api/v1/runs/{run}/data
    GET /api/v1/detectors
    GET /api/v1/projects/{project}/detectors
    PUT /api/v1/projects/{project}/detectors
    PATCH /api/v1/projects/{project}/detectors
    GET /api/v1/runs/{run}/detectors
    GET /api/v1/projects
    GET /api/v1/fleet
    GET /api/v1/audit
    GET /api/v1/notifications
    GET /api/v1/notifications/targets
    POST /api/v1/notifications/targets/{target}/test
    PATCH /api/v1/runs/{run}/tags
""".split("\n")[1:-1]

QUERIES = {
    "/api/v1/runs": "project state q limit cursor",
    "/api/v1/runs/{run}/series": "metric rank from_step to_step max_points",
    "/api/v1/runs/{run}/divergence": "from_step to_step",
    "/api/v1/runs/{run}/alerts": "state severity kind rank q limit cursor",
    "/api/v1/alerts": "project state severity kind rank q limit cursor",
    "/api/v1/runs/{run}/verdict": "fail_on",
    "/api/v1/compare": "runs",
}

RUN_FIELDS = """id project name state world_size ranks started_at last_seen_at last_step config
    verdict""".split()
ALERT_FIELDS = """id run kind severity state title ranks tensors first_step last_step opened_at
    resolved_at acknowledged stage cause remedy evidence consequences""".split()

COMMAND_NAMES = "serve demo gate runs alerts report sync import export db token".split()
# What has come since.
COMMAND_NAMES += "compare show watch doctor check verify mcp notify completion baseline tag".split()


def test_kinds():
    # The contract's, and what has come since.
    since = (
        "desync.batch",
        "desync.rng",
        "rng.shared",
        "push.stale",
        "push.lost",
        "collective.slow",
        "lr.batch_mismatch",
        "accuracy.mismatch",
        "update.drift",
        "update.frozen",
        "update.reset",
        "update.reverted",
        "mode.evaluation",
        "eval.nonfinite",
        "buffers.nonfinite",
        "rank.failed",
        "loss.mismatch",
        "data.unmixed",
        "data.leaked",
        "mode.settings",
        "throughput.dropped",
        "checkpoint.mismatch",
        "baseline.loss",
        "baseline.metric",
    )
    assert {*KINDS, *since} <= set(registry.KINDS)


def test_severities_and_stages():
    assert wire.SEVERITIES == ("info", "warning", "critical")
    chain = "start batch local_gradient reduced_gradient clipped_gradient optimizer_state"
    chain += " hyperparameters parameters"
    links = [s for s in wire.STAGES if s != "outside_optimizer"]
    assert links[: len(chain.split())] == chain.split()
    # What is beside the chain comes after it.
    assert links[len(chain.split()) :] == ["buffers", "watched", "frozen", "average"]
    assert "outside_optimizer" in wire.STAGES


def test_options_of_attach():
    assert {o.name: (o.variable, o.default) for o in OPTIONS} == OPTION_TABLE


def test_the_agent_s_public_names():
    program = "from rankscope import agent; print(sorted(agent.__all__), callable(agent.attach))"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert printed.strip() == "['Monitor', '__version__', 'attach', 'start'] True"


CLIENT_NAMES = """
    Client RunEvent
    ClientError NotAllowed NotFound NotRankscope Problem TryLater Unreachable
""".split()
CLIENT_METHODS = """
    acknowledge alert alert_context alerts audit baseline change_project_detectors change_tags close
    compare data delete_run detectors distances divergence end_silence events fleet ingest
    is_alive is_ready metric_families metrics notification_targets notifications
    project_detectors projects run run_alerts run_detectors runs series server_metrics
    set_project_detectors silence silences take_back_acknowledgement test_notification_target
    verdict
""".split()


def test_the_client_s_public_names():
    assert sorted(client.__all__) == sorted(CLIENT_NAMES)
    assert all(hasattr(client, name) for name in client.__all__)
    methods = {name for name in vars(client.Client) if not name.startswith("_")}
    assert methods == set(CLIENT_METHODS)


def test_commands():
    assert {c.name for c in COMMANDS} == set(COMMAND_NAMES)


@pytest.fixture(scope="module")
def openapi(tmp_path_factory):
    database = tmp_path_factory.mktemp("contract") / "rankscope.db"
    return create_app(Settings(database=f"sqlite:///{database}")).openapi()


def plain(path):
    """A path with the contract's names of its parameters."""
    return re.sub(r"\{(alert|silence)\w*\}", "{id}", re.sub(r"\{run\w*\}", "{run}", path))


def test_routes(openapi):
    served = {
        f"{method.upper()} {plain(path)}"
        for path, methods in openapi["paths"].items()
        for method in methods
    }
    assert served == {route.strip() for route in (*ROUTES, *FURTHER_ROUTES)}


@pytest.mark.parametrize("route", QUERIES)
def test_queries(openapi, route):
    (operation,) = (m["get"] for path, m in openapi["paths"].items() if plain(path) == route)
    names = {p["name"] for p in operation["parameters"] if p["in"] == "query"}
    assert names >= set(QUERIES[route].split())


@pytest.mark.parametrize(("shape", "fields"), [("Run", RUN_FIELDS), ("Alert", ALERT_FIELDS)])
def test_fields(openapi, shape, fields):
    described = openapi["components"]["schemas"][shape]
    assert set(described["properties"]) >= set(fields)
    assert set(described["required"]) >= set(fields)


@pytest.mark.parametrize("command", [c.name for c in COMMANDS])
def test_every_command_explains_itself(command):
    program = "from rankscope.agent.cli import main; raise SystemExit(main())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, command, "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr
    assert f"rankscope {command}" in done.stdout
