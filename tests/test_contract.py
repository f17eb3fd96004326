"""The names that users and their scripts rely on, spelled out once more, apart from the code.

A test here that fails means: a script written against Rankscope would break.
"""

import os
import subprocess
import sys

import pytest

from rankscope.agent import wire
from rankscope.agent.cli import COMMANDS
from rankscope.agent.options import OPTIONS, default_spool

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
    "tensorboard": ("RANKSCOPE_TENSORBOARD", None),
}

COMMAND_NAMES = "serve demo gate runs alerts report sync import export db token".split()
# Of these, what is not built yet; a command leaves the list when it comes.
COMMANDS_TO_COME = set("report import export token".split())


def test_kinds():
    assert sorted(wire.KINDS) == sorted(KINDS)
    assert len(set(wire.KINDS)) == len(wire.KINDS)


def test_severities_and_stages():
    assert wire.SEVERITIES == ("info", "warning", "critical")
    chain = "start batch local_gradient reduced_gradient clipped_gradient optimizer_state"
    chain += " hyperparameters parameters"
    assert [s for s in wire.STAGES if s != "outside_optimizer"] == chain.split()
    assert "outside_optimizer" in wire.STAGES


def test_options_of_attach():
    assert {o.name: (o.variable, o.default) for o in OPTIONS} == OPTION_TABLE


def test_the_agent_s_public_names():
    program = "from rankscope import agent; print(sorted(agent.__all__), callable(agent.attach))"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert printed.strip() == "['Monitor', '__version__', 'attach'] True"


def test_commands():
    assert {c.name for c in COMMANDS} == set(COMMAND_NAMES) - COMMANDS_TO_COME


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
