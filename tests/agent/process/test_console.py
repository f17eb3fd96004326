"""What is kept of a console, what is masked of it, and what a working tree has uncommitted."""

import contextlib
import io
import logging
import subprocess
import sys

import pytest

from rankscope import agent
from rankscope.agent.process.console import Console
from rankscope.agent.process.git import diff_of
from rankscope.agent.process.secrets import masked
from tests.support.servers.collector import Collector


@contextlib.contextmanager
def streams():
    """Streams like those of a process, in place of pytest's, which it changes from phase to phase.

    Gives both, and the console that listens to them.
    """
    made = [io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2)]
    with contextlib.redirect_stdout(made[0]), contextlib.redirect_stderr(made[1]):
        console = Console(5, lambda function: function)
        console.begin()
        try:
            yield *made, console
        finally:
            console.end()


def printed(stream):
    return stream.buffer.getvalue().decode()


def test_the_last_lines_of_both_streams_are_kept_and_printed():
    with streams() as (out, err, console):
        for step in range(7):
            print("step", step)
        print("warned", file=sys.stderr)
    assert console.tail == ["step 3", "step 4", "step 5", "step 6", "warned"]
    assert printed(out).splitlines() == [f"step {step}" for step in range(7)]
    assert printed(err) == "warned\n"


def test_who_holds_the_stream_since_before_is_heard():
    with streams() as (_, err, console):
        handler = logging.StreamHandler(err)
        handler.emit(logging.LogRecord("a", logging.INFO, "", 0, "logged", (), None))
    assert console.tail == ["logged"]


def test_of_a_bar_what_stood_there_last_is_kept():
    with streams() as (_, err, console):
        for share in range(0, 101, 10):
            err.write(f"\r{share}%")
        assert console.tail == ["100%"]
        err.write("\n")
        print("end", end="")
    assert console.tail == ["100%", "end"]


def test_long_lines_are_cut_off():
    with streams() as (out, _, console):
        print("x" * 10_000)
        out.write("y" * 10_000)
    assert [len(line) for line in console.tail] == [2000, 2000]


def test_it_leaves_streams_as_they_were():
    with streams() as (out, err, console):
        console.end()
        assert "write" not in vars(out)
        assert "write" not in vars(err)
        print("unheard")
    assert (printed(out), console.tail) == ("unheard\n", [])


def test_who_has_put_something_over_it_since_keeps_that():
    heard = []
    with streams() as (out, _, console):
        below = out.write
        out.write = lambda text: (heard.append(text), below(text))
        console.end()
        print("on")
    assert "on" in heard
    assert (printed(out), console.tail) == ("on\n", [])


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("HF_TOKEN=abcd1234efgh", "HF_TOKEN=***"),
        ('{"api_key": "abcd1234"}', '{"api_key": "***"}'),
        ("train.py --password hunter22 --lr 0.1", "train.py --password *** --lr 0.1"),
        ("Authorization: Bearer abc.def-ghi", "Authorization: Bearer ***"),
        ("postgresql://me:pw@host/db", "postgresql://***@host/db"),
        ("using ghp_16C7e42F292c6912E7710c838347Ae178B4a", "using ***"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nx", "***\nx"),
        (
            "line\n" + "aB3/" * 16 + "\n-----END RSA PRIVATE KEY-----",
            "line\n***\n-----END RSA PRIVATE KEY-----",
        ),
        ("found sesame-street in it", "found *** in it"),
        # What a training says is no secret.
        ("step 3 loss 0.25 tokens 4096 lr 1e-3", "step 3 loss 0.25 tokens 4096 lr 1e-3"),
        ("tokens/s: 51234.5", "tokens/s: 51234.5"),
        ("keys: 12, see https://host/a@b", "keys: 12, see https://host/a@b"),
    ],
)
def test_secrets_are_masked(text, left):
    environ = {"MY_SECRET": "sesame-street", "KEY": "no", "HOME": "0.25 tokens"}
    assert masked(text, environ) == left


def test_a_working_tree_and_its_commit(tmp_path):
    def git(*arguments):
        named = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *named, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert diff_of(tmp_path, most=1000) == ""
    git("init")
    assert diff_of(tmp_path, most=1000) == ""  # no commit yet
    (tmp_path / "train.py").write_text("lr = 0.1\n")
    git("add", ".")
    git("commit", "-m", "first")
    assert diff_of(tmp_path, most=1000) == ""
    (tmp_path / "train.py").write_text("lr = 0.5\n" + "x\n" * 100_000)
    # The repository's settings name a program: it is not run.
    git("config", "diff.external", f"touch {tmp_path / 'run'}")
    found = diff_of(tmp_path, most=500)
    assert "-lr = 0.1\n+lr = 0.5\n" in found
    assert len(found) == 500
    assert not (tmp_path / "run").exists()


def test_what_is_sent_is_bounded_and_a_secret_that_is_cut_off_is_not_shown(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "sesame-street-" * 20)
    with Collector() as collector:
        with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
            with agent.start(server=collector.url, run="r", console=50) as monitor:
                for _ in range(100):
                    print("x" * 400, "sesame-street-" * 20, "y" * 3000)
                    print("z" * 1900, "sesame-street-" * 20)
                    monitor.step(loss=1.0)
                # A step that does not end, a value that jumps and an alert are told with it.
                for _ in range(20):
                    monitor._around.report()
    sent = [e for b in collector.batches for e in b.events if e.kind == "console"]
    assert len(sent) == 1
    lines = sent[0].data["lines"]
    assert 10 < len(lines) <= 50
    assert sum(map(len, lines)) <= 8_000
    assert max(map(len, lines)) <= 500
    assert "sesame" not in "".join(lines)


@pytest.mark.parametrize("piece", [".", "-", "0123456789abcdef", "a.", "token", "--token", "a://"])
def test_a_line_without_an_end_is_gone_through_once(piece):
    """Ten thousand times as long would be for ever, and the training waits meanwhile."""
    line = piece * (240_000 // len(piece))
    assert masked(line, {}) == line
