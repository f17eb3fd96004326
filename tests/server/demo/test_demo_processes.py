"""Processes of the demo end with it, whenever that is."""

import os
import signal
import subprocess
import sys

import pytest

from rankscope.server.demo.processes import Job, handling_sigterm


def test_a_signal_while_a_rank_is_being_started_leaves_none_behind(tmp_path, monkeypatch):
    made = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)
            if len(made) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    forever = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(SystemExit), handling_sigterm():
        Job(forever, ranks=3, folder=tmp_path)
    assert [child.poll() is None for child in made] == [False, False]
