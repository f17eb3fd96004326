"""Ranks find their place and their run's id in the processes of a real machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.agent.process.ancestry import Process, launching_process, read_process

READABLE = re.compile(r"[a-z]+-[a-z]+-[0-9a-f]{8}")


def test_this_process_is_in_the_table() -> None:
    me = read_process(os.getpid())

    assert me is not None
    assert me.parent == os.getppid()
    assert me.started > 0
    assert me.command == tuple(sys.orig_argv)
    assert "PATH" in me.variables
    assert read_process(2**22 + 1) is None


def test_a_name_with_parentheses_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "stat").write_bytes(b"7 (a) b (c)) S 3 " + b"0 " * 17 + b"4242 0")
    (folder / "cmdline").write_bytes(b"a\0")

    assert read_process(7, tmp_path) == Process(7, 3, 4242, ("a",))


SAY = """
import os, sys
from rankscope.agent.launcher import identify
i = identify(os.environ)
sys.stdout.write(f"{i.run} {i.rank} {i.local_rank} {i.world_size} {i.attempt} {i.launcher}\\n")
"""


def launch(command: list[str], tmp_path: Path, text: str = SAY) -> list[list[str]]:
    script = tmp_path / "say.py"
    script.write_text(text)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("RANKSCOPE_")}
    done = subprocess.run(
        [*command, str(script)],
        env=environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [line.split() for line in sorted(done.stdout.splitlines())]


@pytest.mark.e2e
def test_real_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]

    first, second = launch(command, tmp_path), launch(command, tmp_path)

    run = first[0][0]
    assert first == [[run, str(k), str(k), "4", "0", "torchrun"] for k in range(4)]
    assert READABLE.fullmatch(run)
    assert {line[0] for line in second} != {run}


def test_real_ranks_of_a_shell_script(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text('for r in 0 1 2; do RANK=$r WORLD_SIZE=3 "$0" "$1" & done; wait\n')

    said = launch(["bash", "-c", script.read_text(), sys.executable], tmp_path)

    run = said[0][0]
    assert said == [[run, str(k), str(k), "3", "None", "environment"] for k in range(3)]


SPAWN = """
import multiprocessing, sys
from rankscope.agent.launcher import identify

def child(rank):
    sys.stdout.write(identify({}, torch_distributed=lambda: (rank, 3)).run + "\\n")

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        children = [context.Process(target=child, args=(rank,)) for rank in range(3)]
        for process in children:
            process.start()
        for process in children:
            process.join()
"""


def test_real_children_of_multiprocessing(tmp_path: Path) -> None:
    said = launch([sys.executable], tmp_path, SPAWN)

    assert len(said) == 9
    assert len({line[0] for line in said}) == 1


def test_no_process_table_no_launcher() -> None:
    assert launching_process(1, frozenset(), lambda pid: None) is None
