"""Arguments of `rankscope demo` that cannot work, and its list of faults."""

import socket

import pytest

from rankscope.server.demo.command import main
from rankscope.server.demo.faults import FAULTS


@pytest.mark.parametrize(
    ("argv", "phrases"),
    [
        (["--fault", "bitflop"], ["bitflop", "bitflip", "skipped-allreduce"]),
        (["--ranks", "1"], ["--ranks 1", "2 to 64"]),
        (["--fault", "bad-labels", "--ranks", "2"], ["bad-labels needs 3"]),
        (["--steps", "10"], ["--steps 10", "60"]),
        (["--seed", "-1"], ["--seed -1"]),
        (["--port", "70000"], ["--port 70000"]),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(argv, phrases, capsys):
    assert main(argv) == 2
    reported = capsys.readouterr()
    assert all(phrase in reported.err for phrase in phrases)
    assert reported.out == ""


@pytest.mark.parametrize("argv", [["--steps", "many"], ["--faults", "none"], ["extra"]])
def test_what_the_parser_refuses_ends_with_2_as_well(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "usage: rankscope demo" in capsys.readouterr().err


def test_a_port_in_use_is_refused(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["--port", str(port)]) == 2
    assert f"--port {port}" in capsys.readouterr().err


def test_the_list_names_every_fault_and_what_is_expected(capsys):
    assert main(["--list-faults"]) == 0
    listed = capsys.readouterr().out
    for fault in FAULTS.values():
        assert fault.name in listed
        assert fault.what in listed
        assert all(kind in listed for kind in fault.kinds)
