"""What a real process still says, however it ends, and that it ends as it would have."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

PRELUDE = """
import os, sys, time, threading, signal
from rankscope.agent.delivery import process_exit
def say(text):
    # Past `sys.stdout`: a signal may come while that is being flushed, and it lets nobody in twice.
    os.write(1, f"{text}\\n".encode())
def speak(state, error):
    say(f"said {state}|{error}")
process_exit.add(speak)
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


def test_an_uncaught_error_is_reported_and_still_printed():
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
def test_sigterm_is_reported_and_obeyed_at_once(blocked):
    process = start(
        f"""
        say("ready")
        {blocked}
        """
    )
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process)
    assert (code, out) == (-signal.SIGTERM, "said failed|terminated by SIGTERM\n")
    assert time.monotonic() - began < 4


def test_sigterm_after_an_event_loop_has_taken_the_wake_up_byte():
    process = start(
        """
        import asyncio
        async def main():
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGUSR1, lambda: None)
            loop.remove_signal_handler(signal.SIGUSR1)
        asyncio.run(main())
        say("ready")
        time.sleep(60)
        """
    )
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process)
    assert (code, out) == (-signal.SIGTERM, "said failed|terminated by SIGTERM\n")
    assert time.monotonic() - began < 4


FAILS = """
def fails():
    try:
        raise ValueError("of the trainer")
    except ValueError:
        sys.exit(%s)
"""


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (FAILS % "1" + "fails()", 1, "failed|ValueError: of the trainer"),
        (FAILS % "'a text'" + "fails()", 1, "failed|ValueError: of the trainer"),
        (FAILS % "0" + "fails()", 0, "finished|"),
        (FAILS % "" + "fails()", 0, "finished|"),
        # Caught: the process goes on, and ends as it ends.
        (FAILS % "1" + "try:\n    fails()\nexcept SystemExit:\n    pass", 0, "finished|"),
        (
            FAILS % "1" + "try:\n    fails()\nexcept SystemExit as e:\n    kept = e",
            0,
            "finished|",
        ),
        (FAILS % "1" + "t = threading.Thread(target=fails); t.start(); t.join()", 0, "finished|"),
        # Whoever started it sees the failure, too.
        ("sys.exit(3)", 3, "failed|SystemExit: 3"),
        ("def main():\n    return 'no data'\nsys.exit(main())", 1, "failed|SystemExit: no data"),
        ("sys.exit(0)", 0, "finished|"),
        ("sys.exit()", 0, "finished|"),
        ("try:\n    sys.exit(3)\nexcept SystemExit:\n    pass", 0, "finished|"),
    ],
)
def test_an_error_that_is_handled_by_an_exit_is_reported(body, code, said):
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + body], stdout=subprocess.PIPE, text=True
    )
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (code, f"said {said}\n")


def test_a_crash_that_is_then_terminated_is_reported_as_the_crash():
    process = start(
        """
        process_exit.remove(speak)
        def slow(state, error):
            say("begun")
            time.sleep(0.5)
            speak(state, error)
        process_exit.add(slow)
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
            say("mine")
            sys.exit(3)
        signal.signal(signal.SIGTERM, mine)
        say("ready")
        time.sleep(60)
        """
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process)
    assert (code, out) == (3, "mine\nsaid failed|SystemExit: 3\n")


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
            process_exit.remove(speak)
            assert sys.excepthook is sys.__excepthook__
            assert sys.exit.__module__ == "sys"
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            assert signal.set_wakeup_fd(-1) == -1
            """
        )
    )
    assert (code, out) == (0, "")
