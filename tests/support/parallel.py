"""Several workers of pytest beside each other: which file is next, who waits, and what is left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

# The environment of all workers and of what they start; its value is a folder of this run alone.
RUN = "TESTS_OF_RANKSCOPE"

# Files that take longest (`--durations=0`, summed by file): started last, one of them would keep a
# worker busy while the others have nothing left. Those that compute stand in turns with those that
# wait (for a browser, a silence, a time-out): so the processors are busy, and not crowded. Files
# with tests that are `alone` stay out: beside these, the other workers would wait for long tests.
LONGEST = (
    "e2e/test_demo.py",
    "dashboard/test_browser_live.py",
    "server/detectors/test_properties.py",
    "e2e/test_hangs.py",
    "e2e/test_small_jobs.py",
    "e2e/test_crashes.py",
    "e2e/test_replay.py",
    "dashboard/test_browser_growing.py",
    "agent/faults/test_every_function.py",
    "e2e/test_deaths.py",
    "e2e/test_unseen.py",
    "dashboard/test_browser_overviews.py",
    "server/detectors/test_cases.py",
    "e2e/test_notified.py",
    "e2e/test_local_sgd.py",
    "dashboard/test_browser.py",
    "server/detectors/mechanisms/test_peers.py",
    "e2e/test_alert_context.py",
    "agent/faults/test_probe_faults.py",
    "dashboard/test_browser_first_screen.py",
    "agent/model/test_kept_while_attached.py",
    "dashboard/test_browser_verdicts.py",
    "e2e/test_drawn_lab.py",
    "e2e/test_reruns.py",
    "e2e/test_logging_jobs.py",
    "e2e/test_training.py",
    "e2e/test_background.py",
    "agent/faults/test_monitor_faults.py",
    "e2e/test_two_servers.py",
    "agent/faults/test_spool_faults.py",
    "agent/test_bit_identity.py",
    "agent/faults/test_sender_faults.py",
    "e2e/test_modes.py",
    "server/storage/maintenance/test_rollups.py",
    "agent/process/test_processes_of_a_trainer.py",
    "e2e/test_faultlab.py",
    "agent/fingerprint/test_fingerprint_triton.py",
    "agent/probes/machine/test_timing.py",
    "server/storage/maintenance/test_merging.py",
    "e2e/test_layers.py",
    "server/evaluation/test_starts.py",
    "server/evaluation/test_snapshots.py",
    "server/api/test_judgement.py",
    "server/api/test_api.py",
    "server/api/test_detector_settings.py",
)

# What has been asked to end, or notices that its parent is gone, has done so by then.
_PATIENCE_SECONDS = 15.0


class Turns:
    """Lets tests of several workers run beside each other, except those that want to be alone.

    Two files are locked: who comes next holds the first one until it has the second, which is held
    while a test runs, shared or not. So a test that waits to be alone is not overtaken for ever.
    """

    def __init__(self, folder: Path) -> None:
        # Open all the time: some tests use up all file descriptors there are.
        self._next = (folder / "next").open("w")
        self._running = (folder / "running").open("w")

    def close(self) -> None:
        self._next.close()
        self._running.close()

    @contextlib.contextmanager
    def turn(self, *, alone: bool) -> Iterator[None]:
        """Held during one test."""
        fcntl.flock(self._next, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)
        try:
            yield
        finally:
            # Explicitly: forked children may still have the files open.
            fcntl.flock(self._running, fcntl.LOCK_UN)


def left_behind(patience: float = _PATIENCE_SECONDS) -> list[str]:
    """Command lines of processes that this run has started and that do not end; it ends them."""
    end = time.monotonic() + patience
    while (left := _of_this_run()) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"{pid}: {command}" for pid, command in left.items()]


def _of_this_run() -> dict[int, str]:
    mark = f"{RUN}={os.environ[RUN]}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                found[int(folder.name)] = b" ".join(words).decode(errors="replace").strip()
        except OSError:
            continue  # it is gone, or somebody else's
    found.pop(os.getpid(), None)
    return found
