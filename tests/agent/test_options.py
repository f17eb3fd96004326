"""Options: argument over environment over default; what cannot work is refused with a hint."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rankscope.agent.options import OPTIONS, Options, facts_of, resolve


def test_defaults() -> None:
    options = resolve({}, {})

    assert options == Options(spool=options.spool)
    assert options.server == "http://127.0.0.1:8642"
    assert options.mode == "online"
    assert options.spool.is_absolute()


def test_the_table_is_the_dataclass() -> None:
    assert [option.name for option in OPTIONS] == [field.name for field in fields(Options)]
    assert all(option.variable == f"RANKSCOPE_{option.name.upper()}" for option in OPTIONS)
    assert all(option.help for option in OPTIONS)


def test_the_defaults_of_table_and_dataclass_agree() -> None:
    made = Options()

    for option in OPTIONS:
        default = option.default() if callable(option.default) else option.default
        assert getattr(made, option.name) == default


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("server", "https://host/prefix/", "https://host/prefix"),
        ("server", "http://[::1]:80", "http://[::1]:80"),
        ("token", " s3cret\n", "s3cret"),
        ("project", "vision", "vision"),
        ("run", "brisk-heron é 1", "brisk-heron é 1"),
        ("mode", "offline", "offline"),
        ("spool", "/tmp/spool", Path("/tmp/spool")),
        ("spool", "~/spool", Path.home() / "spool"),
        ("spool", "here", Path.cwd() / "here"),
        ("overhead", "0.05", 0.05),
        ("overhead", "1", 1.0),
        ("allowance", "0", 0.0),
        ("allowance", "2.5", 2.5),
        ("allowance", "inf", float("inf")),
        ("tensorboard", "/tmp/tb", Path("/tmp/tb")),
        ("tags", "nightly, ablation 3,nightly", ("ablation 3", "nightly")),
    ],
)
def test_the_environment_is_read(name: str, text: str, value: Any) -> None:
    options = resolve({}, {f"RANKSCOPE_{name.upper()}": text})

    assert getattr(options, name) == value


def test_an_argument_beats_the_environment() -> None:
    environ = {"RANKSCOPE_RUN": "theirs", "RANKSCOPE_OVERHEAD": "nonsense"}

    options = resolve({"run": "ours", "overhead": 0.5, "mode": None}, environ)

    assert (options.run, options.overhead, options.mode) == ("ours", 0.5, "online")


def test_an_empty_variable_is_not_given() -> None:
    assert resolve({}, {"RANKSCOPE_RUN": "", "RANKSCOPE_SERVER": ""}) == resolve({}, {})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("server", "127.0.0.1:8642", "http://127.0.0.1:8642"),
        ("server", "ftp://host", "write it like"),
        ("server", "http://", "write it like"),
        ("server", "http://host:port", "Port"),
        ("server", "http://host:99999", "Port"),
        ("server", "http://host:0", "port 0"),
        ("server", "http://host/?a=1", "'?'"),
        ("server", "http://ho st", "spaces"),
        ("project", "", "printable"),
        ("run", "a\nb", "printable"),
        ("run", " a", "outer spaces"),
        ("run", "x" * 251, "250"),
        ("run", "a/b", "write '-' instead"),
        ("run", "..", "slash"),
        ("mode", "on", "online, offline, disabled"),
        ("overhead", 0, "for example 0.01"),
        ("overhead", 1.01, "up to 1"),
        ("overhead", float("nan"), "above 0"),
        ("overhead", "1%", "for example 0.01"),
        ("allowance", -1, "from 0"),
        ("allowance", float("nan"), "from 0"),
        ("allowance", "10 s", "for example 10"),
        ("spool", "/dev/null", "name a folder"),
        ("spool", "a\0b", "character"),
    ],
)
def test_an_impossible_value_is_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"option '{name}'") as refusal:
        resolve({name: value}, {})

    assert said in str(refusal.value)
    assert f"the argument {name}=" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("server", 8642),
        ("token", b"x"),
        ("run", 7),
        ("overhead", True),
        ("allowance", True),
        ("allowance", []),
        ("overhead", []),
        ("spool", 3),
    ],
)
def test_a_wrong_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"option '{name}'.*must be"):
        resolve({name: value}, {})


def test_a_refusal_names_the_variable() -> None:
    with pytest.raises(ValueError, match=r"the variable RANKSCOPE_OVERHEAD \('2'\)"):
        resolve({}, {"RANKSCOPE_OVERHEAD": "2"})


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match="no option 'sever'; did you mean 'server'"):
        resolve({"sever": "http://host"}, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token", "hunter2 hunter2"),
        ("token", "hunter2\x7f"),
        ("token", "hunter2é"),
        ("server", "http://me:hunter2@host"),
        ("server", "http://[me:hunter2@host"),
    ],
)
def test_a_secret_is_never_shown(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name) as refusal:
        resolve({name: value}, {})

    assert "hunter2" not in str(refusal.value)
    assert refusal.value.__suppress_context__


def test_a_token_is_not_in_the_repr() -> None:
    assert "hunter2" not in repr(resolve({"token": "hunter2"}, {}))


def test_what_a_user_says_of_a_run() -> None:
    assert facts_of(None) == {}
    assert facts_of({"profile": "adversarial", "depth": 3}) == {
        "profile": "adversarial",
        "depth": 3,
    }


@pytest.mark.parametrize(
    ("config", "kind", "reported"),
    [
        (
            {"profile": "gan"},
            ValueError,
            "'gan': must be one of descent, adversarial, reinforcement",
        ),
        ([("a", 1)], TypeError, "must be a map"),
        ({1: 2}, TypeError, "must be a map from names"),
        ({"model": object()}, TypeError, "must be JSON-able: Object of type object"),
    ],
)
def test_what_cannot_be_said_is_refused_before_training(
    config: Any, kind: type[Exception], reported: str
) -> None:
    with pytest.raises(kind, match=reported):
        facts_of(config)


@pytest.mark.parametrize(
    ("environ", "allowance"),
    [
        ({}, 10),
        ({"CI": "true"}, float("inf")),
        ({"CI": "True "}, float("inf")),
        ({"CI": "1"}, float("inf")),
        ({"CI": "false"}, 10),
        ({"CI": ""}, 10),
        ({"CI": "true", "RANKSCOPE_ALLOWANCE": "3"}, 3),
    ],
)
def test_in_continuous_integration_every_step_is_sampled_unless_said_otherwise(environ, allowance):
    assert resolve({}, environ).allowance == allowance
    assert resolve({"allowance": 0}, environ).allowance == 0
