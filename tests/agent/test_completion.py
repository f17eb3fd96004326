"""Shells complete what the command takes: real ones, asked as they ask themselves."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.agent.cli import COMMANDS
from rankscope.agent.completion import completion

BIN = str(Path(sys.executable).parent)


def script(shell, capsys):
    assert completion([shell]) == 0
    return capsys.readouterr().out


def said(program, *arguments):
    done = subprocess.run(
        [program, *arguments],
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


def in_bash(capsys, *words):
    """What bash would offer for the last of the words."""
    line = script("bash", capsys) + (
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _rankscope; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    return said("bash", "-c", line, "bash", *words)


def test_bash_completes_commands(capsys):
    assert set(in_bash(capsys, "rankscope", "")) == {c.name for c in COMMANDS}
    assert in_bash(capsys, "rankscope", "ver") == ["verify"]


def test_bash_completes_options_of_a_command(capsys):
    assert {"--server", "--token", "--json"} <= set(in_bash(capsys, "rankscope", "show", "--"))
    assert in_bash(capsys, "rankscope", "gate", "otter", "--fail") == ["--fail-on"]


def test_bash_completes_actions_and_their_options(capsys):
    actions = {"add", "list", "remove", "test", "log"}
    assert set(in_bash(capsys, "rankscope", "notify", "")) == actions
    assert in_bash(capsys, "rankscope", "notify", "add", "--sev") == ["--severity"]
    assert "--severity" not in in_bash(capsys, "rankscope", "notify", "list", "--")


def test_bash_runs_nothing_for_what_is_no_command(capsys, tmp_path):
    trap = f"$(touch {tmp_path / 'ran'})"
    assert in_bash(capsys, "rankscope", trap, "--") == []
    in_bash(capsys, "rankscope", "notify", trap, "--sev")
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
def test_zsh_takes_the_script(capsys):
    line = script("zsh", capsys) + "print ${_comps[rankscope]}"
    assert said("zsh", "-f", "-c", line) == ["_bash_complete", "-o", "default", "-F", "_rankscope"]


@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")
def test_fish_completes_commands_and_options(capsys):
    line = script("fish", capsys)
    assert said("fish", "-c", line + "complete -C 'rankscope ver'") == ["verify"]
    assert "--fail-on" in said("fish", "-c", line + "complete -C 'rankscope gate --fail'")
