"""What commands that ask a server have in common."""

import pytest

from rankscope.agent import cli

COMMANDS = {
    "runs": (),
    "alerts": ("otter",),
    "show": ("otter",),
    "watch": ("otter",),
    "report": ("otter", "-o", "otter.html"),
    "compare": ("otter", "heron"),
    "export": ("otter", "--format", "csv", "-o", "otter.csv"),
    "import": ("tensorboard", "logs"),
    "gate": ("otter",),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("token", ["two\nlines", "токен", "a b"])
def test_a_token_that_cannot_be_one_is_refused(command, token, monkeypatch, capsys):
    monkeypatch.setenv("RANKSCOPE_TOKEN", token)
    with pytest.raises(SystemExit, match="2"):
        cli.main([command, *COMMANDS[command], "--server", "http://127.0.0.1:9"])
    said = capsys.readouterr().err
    assert "a token is ASCII text without spaces" in said
    assert token not in said


def test_an_empty_token_is_none(monkeypatch, capsys):
    monkeypatch.setenv("RANKSCOPE_TOKEN", "")
    for command in ("show", "gate"):
        assert cli.main([command, "otter", "--server", "http://127.0.0.1:9"]) == 3
    assert "a token" not in capsys.readouterr().err
