"""What a real process still says, however it ends, and that it ends as it would have."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

PRELUDE = """
import os, sys, time, threading, signal
from rankscope.agent import last_words
def speak(state, error):
    sys.stdout.write(f"said {state}|{error}\\n"); sys.stdout.flush()
last_words.add(speak)
"""


def start(body):
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, timeout=20):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def test_a_normal_end():
    assert finish(start("pass"))[:2] == (0, "said finished|\n")


def test_an_uncaught_error_is_told_and_still_printed():
    code, out, err = finish(start("raise RuntimeError('Connection closed by peer')"))
    assert (code, out) == (1, "said failed|RuntimeError: Connection closed by peer\n")
    assert "Traceback" in err
    assert "Connection closed by peer" in err


@pytest.mark.parametrize(
    "blocked",
    [
        "time.sleep(60)",
        # A main thread inside a call into C that no signal interrupts, as in a hung collective.
        "import ctypes; mutex = ctypes.create_string_buffer(64);"
        " lock = ctypes.CDLL(None).pthread_mutex_lock; lock(mutex); lock(mutex)",
    ],
    ids=["asleep", "blocked in C"],
)
def test_sigterm_is_told_and_obeyed_at_once(blocked):
    process = start(
        f"""
        sys.stdout.write("ready\\n"); sys.stdout.flush()
        {blocked}
        """
    )
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process)
    assert (code, out) == (-signal.SIGTERM, "said failed|terminated by SIGTERM\n")
    assert time.monotonic() - began < 4


def test_a_crash_that_is_then_terminated_is_told_as_the_crash():
    process = start(
        """
        last_words.remove(speak)
        def slow(state, error):
            sys.stdout.write("begun\\n"); sys.stdout.flush()
            time.sleep(0.5)
            speak(state, error)
        last_words.add(slow)
        raise RuntimeError("gloo")
        """
    )
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process)
    assert code in (1, -signal.SIGTERM)
    assert out == "said failed|RuntimeError: gloo\n"


def test_a_handler_of_the_trainer_is_left_alone():
    process = start(
        """
        def mine(number, frame):
            sys.stdout.write("mine\\n"); sys.stdout.flush()
            sys.exit(3)
        signal.signal(signal.SIGTERM, mine)
        sys.stdout.write("ready\\n"); sys.stdout.flush()
        time.sleep(60)
        """
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process)
    assert (code, out) == (3, "mine\nsaid finished|\n")


def test_a_forked_child_says_nothing_and_dies_of_sigterm():
    code, out, _ = finish(
        start(
            """
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            time.sleep(0.2)
            os.kill(child, signal.SIGTERM)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM, status
            """
        )
    )
    assert (code, out) == (0, "said finished|\n")


def test_taking_the_speaker_back_leaves_the_process_as_it_was():
    code, out, _ = finish(
        start(
            """
            last_words.remove(speak)
            assert sys.excepthook is sys.__excepthook__
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            assert signal.set_wakeup_fd(-1) == -1
            """
        )
    )
    assert (code, out) == (0, "")
