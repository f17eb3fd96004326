"""How ranks end that `multiprocessing` has started: it prints their errors, and calls no hook."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers.collector import Collector

TRAINER = """
import multiprocessing
import sys

import torch

from rankscope import agent


def broken():
    raise RuntimeError("boom")


def train(url, spool, end):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = agent.attach(model, optimizer, server=url, spool=spool, run="child")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
    if end == "raise":
        broken()
    if end == "closed":
        try:
            broken()
        finally:
            monitor.close()
    if end == "exit":
        sys.exit(3)
    if end == "handled":
        try:
            broken()
        except RuntimeError:
            sys.exit(1)


if __name__ == "__main__":
    method, *arguments = sys.argv[1:]
    process = multiprocessing.get_context(method).Process(target=train, args=arguments)
    process.start()
    process.join()
    print(process.exitcode)
"""


@pytest.mark.parametrize(
    ("method", "end", "code", "state", "error"),
    [
        ("fork", "", 0, "finished", ""),
        ("fork", "raise", 1, "failed", "RuntimeError: boom"),
        ("fork", "closed", 1, "failed", "RuntimeError: boom"),
        ("fork", "exit", 3, "failed", "SystemExit: 3"),
        ("fork", "handled", 1, "failed", "RuntimeError: boom"),
        ("spawn", "", 0, "finished", ""),
        ("spawn", "raise", 1, "failed", "RuntimeError: boom"),
    ],
)
def test_an_error_of_a_child_is_told(
    tmp_path: Path, method: str, end: str, code: int, state: str, error: str
) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER, encoding="utf-8")
    with Collector() as collector:
        done = subprocess.run(
            [sys.executable, str(script), method, collector.url, str(tmp_path / "spool"), end],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.stdout == f"{code}\n", done.stderr
        last = collector.batches[-1]
    assert (last.state, last.error) == (state, error)
    # The traceback is printed as without the agent.
    assert ("RuntimeError: boom" in done.stderr) == (end in ("raise", "closed"))
