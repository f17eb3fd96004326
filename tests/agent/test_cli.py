"""The command `rankscope`: commands are found, explained, and imported only when called."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points, version
from importlib.util import find_spec

import pytest

from rankscope.agent import cli


def rankscope(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    call = f"import sys; {before}\nfrom rankscope.agent.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", call, *arguments], capture_output=True, text=True, timeout=60
    )


def test_the_entry_point_is_installed() -> None:
    (script,) = (e for e in entry_points(group="console_scripts") if e.name == "rankscope")

    assert script.load() is cli.main


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0

    listed = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert f"\n  {command.name} " in listed
        assert command.help in listed
    assert max(map(len, listed.splitlines())) <= 90


def test_without_a_command_it_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == cli.USAGE_ERROR == 2
    assert "usage: rankscope" in capsys.readouterr().out


@pytest.mark.parametrize("argument", ["--version", "-V"])
def test_version(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([argument]) == 0
    assert capsys.readouterr().out == f"rankscope {version('rankscope')}\n"


@pytest.mark.parametrize(
    ("typed", "hint"), [("serv", "did you mean 'serve'?"), ("allerts", "'alerts'"), ("xyzzy", "")]
)
def test_an_unknown_command_gets_a_hint(
    typed: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([typed]) == 2

    said = capsys.readouterr().err
    assert f"no command '{typed}'" in said
    assert hint in said
    assert "--help" in said


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda c: c.name)
def test_every_command_has_a_home(command: cli.Command) -> None:
    module, function = command.home.split(":")

    if command.extra:
        pytest.importorskip("fastapi")
    assert find_spec(module) is not None
    assert callable(getattr(import_module(module), function))


def test_a_missing_extra_is_reported_with_the_line_that_helps() -> None:
    missing = "; ".join(f"sys.modules[{name!r}] = None" for name in ("fastapi", "sqlalchemy"))

    done = rankscope("serve", before=missing)

    assert done.returncode == 2
    assert "pip install 'rankscope[server]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_version_import_nothing_heavy() -> None:
    done = rankscope(
        "--version",
        before="import atexit; atexit.register(lambda: print("
        "sorted({'torch', 'numpy', 'fastapi', 'urllib3'} & set(sys.modules))))",
    )

    assert done.stdout == f"rankscope {version('rankscope')}\n[]\n"


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("rankscope.agent.delivery.sync.main", interrupted)

    assert cli.main(["sync"]) == 130


def test_a_reader_that_had_enough_is_no_traceback(tmp_path: object) -> None:
    call = (
        "import sys; from rankscope.agent import cli; from rankscope.agent.delivery import sync\n"
        "sync.main = lambda arguments: print('line\\n' * 10**6) or 0\n"
        "sys.exit(cli.main(['sync']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", call], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 141
