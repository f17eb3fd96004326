"""The options of `attach`: one table of name, environment variable, default, parser and help.

An argument beats the environment, the environment beats the default. What is unknown or cannot
work is refused before training starts; nothing is refused later.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import platformdirs

from rankscope.agent.wire import MAX_NAME_LENGTH, PROFILES, tags

Mode = Literal["online", "offline", "disabled"]
# Lines of a console that are kept at most: what a person reads beside an alert.
CONSOLE_LINES = 200
MODES: tuple[Mode, ...] = ("online", "offline", "disabled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user chose, checked.

    Attributes:
        server: URL of the server, without a slash at its end.
        token: bearer token; never printed, not even by `repr`.
        run: run id, or None to take the launcher's.
        spool: folder where batches wait while the server is away.
        overhead: largest share of the step time that the agent may take, in (0, 1].
        allowance: seconds of the agent's own time that are spent on samples of every step before
            `overhead` governs; infinite in continuous integration.
        tensorboard: folder for TensorBoard events, or None.
        console: last lines that are kept of what the process prints, and sent when something is
            found; 0: none.
        git_diff: whether what the working tree has beyond its commit is sent, once.
        tags: words by which the run is found again, by name; the server keeps them with the run.
    """

    server: str = "http://127.0.0.1:8642"
    token: str | None = field(default=None, repr=False)
    project: str = "default"
    run: str | None = None
    mode: Mode = "online"
    spool: Path = field(default_factory=lambda: default_spool())
    overhead: float = 0.01
    allowance: float = 10.0
    tensorboard: Path | None = None
    console: int = 0
    git_diff: bool = False
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """One line of the table.

    Attributes:
        default: the value, or a function that makes it.
        parse: from what was given (text, where it comes from the environment) to the value; raises
            ValueError or TypeError with a sentence that goes on after "is given as ...".
        secret: the value must not appear in any message.
        in_ci: the default where the environment says `CI=true`, if it is another one there.
    """

    name: str
    variable: str
    default: Any
    parse: Callable[[Any], Any]
    help: str
    secret: bool = False
    in_ci: Any = None


def resolve(arguments: Mapping[str, object], environ: Mapping[str, str]) -> Options:
    """The options in force. An argument of None and an empty variable count as not given.

    Raises:
        TypeError: an option that does not exist, or a value of a wrong type.
        ValueError: a value that cannot work.
    """
    for name in arguments:
        if name not in _BY_NAME:
            close = difflib.get_close_matches(name, _BY_NAME, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"there is no option {name!r}{hint} Options: {', '.join(_BY_NAME)}")
    return Options(**{o.name: _value(o, arguments.get(o.name), environ) for o in OPTIONS})


def facts_of(config: Mapping[str, Any] | None, run_tags: Sequence[str] = ()) -> dict[str, Any]:
    """What a user says of a run, checked before training starts.

    Args:
        config: JSON-able; `profile`, where it is given, is one of `wire.PROFILES`.
        run_tags: the option `tags`; where there are any, they are its member `tags`.

    Raises:
        TypeError: it is no map of names to what JSON can say.
        ValueError: there is no such profile.
    """
    named = {"tags": list(run_tags)} if run_tags else {}
    if config is None:
        return named
    if not isinstance(config, Mapping) or any(not isinstance(name, str) for name in config):
        raise TypeError("config= must be a map from names to values")
    facts = dict(config)
    try:
        json.dumps(facts)
    except (TypeError, ValueError) as error:
        raise TypeError(f"config= must be JSON-able: {error}") from None
    profile = facts.get("profile")
    if profile is not None and profile not in PROFILES:
        raise ValueError(
            f"config= has the profile {profile!r}: must be one of {', '.join(PROFILES)}"
        )
    return {**facts, **named}


def default_spool() -> Path:
    """Folder for waiting batches where the user names none."""
    return platformdirs.user_cache_path("rankscope", appauthor=False) / "spool"


def _value(option: Option, argument: object, environ: Mapping[str, str]) -> Any:
    given, origin = argument, f"the argument {option.name}="
    if given is None:
        given, origin = environ.get(option.variable) or None, f"the variable {option.variable}"
    if given is None and option.in_ci is not None and in_ci(environ):
        return option.in_ci
    if given is None:
        return option.default() if callable(option.default) else option.default
    try:
        return option.parse(given)
    except (TypeError, ValueError) as error:
        secret = option.secret or isinstance(error, _SecretInside)
        shown = "" if secret else f" ({given!r})"
        kind = TypeError if isinstance(error, TypeError) else ValueError
        # The cause is cut off: its traceback may hold a secret.
        raise kind(f"option {option.name!r}, from {origin}{shown}: {error}") from None


# ------------------------------------------------------------------------------------------ parsers


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError(f"must be text, not {type(given).__name__}")
    return given


def _url(given: Any) -> str:
    url = _text(given).strip().rstrip("/")
    if "@" in url:
        raise _SecretInside("a URL has no user and no password in it; give a token instead")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("is no URL of a server; write it like http://127.0.0.1:8642")
    if parts.query or parts.fragment or any(c.isspace() or not c.isprintable() for c in url):
        raise ValueError("a server's URL has no spaces, no '?' and no '#'")
    if parts.port == 0:
        raise ValueError("port 0 is no port to connect to")
    return url


def _token(given: Any) -> str:
    token = _text(given).strip()
    if not token or not token.isascii() or any(c <= " " or c == "\x7f" for c in token):
        raise ValueError("a token is ASCII text without spaces; copy it again as it was made")
    return token


def _name(given: Any) -> str:
    name = _text(given)
    if not 1 <= len(name) <= MAX_NAME_LENGTH or not name.isprintable() or name != name.strip():
        raise ValueError(f"must be 1 to {MAX_NAME_LENGTH} printable characters, no outer spaces")
    # It stands in addresses and names a folder of the spool.
    if "/" in name or "\\" in name or name in (".", ".."):
        raise ValueError("stands in addresses, so it cannot have a slash; write '-' instead")
    return name


def _mode(given: Any) -> Mode:
    if given not in MODES:
        raise ValueError(f"is none of {', '.join(MODES)}")
    return cast(Mode, given)


def _folder(given: Any) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"must be a folder, not {type(given).__name__}")
    folder = Path(given).expanduser()
    if "\0" in str(folder):
        raise ValueError("has a character that no path can have")
    if folder.exists() and not folder.is_dir():
        raise ValueError("is a file; name a folder")
    # Absolute, because trainers change their working folder after attach.
    return folder.absolute()


def _share(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise TypeError(f"must be a number, not {type(given).__name__}")
    try:
        share = float(given)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ValueError("must be a share of the step time above 0 and up to 1, for example 0.01")
    return share


def _seconds(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise TypeError(f"must be a number, not {type(given).__name__}")
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ValueError("must be a number of seconds from 0, for example 10, or inf for all steps")
    return seconds


def _lines(given: Any) -> int:
    text = str(given).strip()
    if isinstance(given, bool) or not text.isdecimal() or int(text) > CONSOLE_LINES:
        raise ValueError(f"must be a number of lines from 0 to {CONSOLE_LINES}")
    return int(text)


def _switch(given: Any) -> bool:
    text = str(given).strip().lower()
    if text not in ("0", "1", "false", "true"):
        raise ValueError("must be true or false, 1 or 0")
    return text in ("1", "true")


def _tags(given: Any) -> tuple[str, ...]:
    named = given.split(",") if isinstance(given, str) else given
    if not isinstance(named, list | tuple | set | frozenset):
        raise TypeError(
            f"must be tags, or one text of them with commas, not {type(given).__name__}"
        )
    found = [tag.strip() if isinstance(tag, str) else tag for tag in named]
    for tag in found:
        if (problem := tags.problem_of(tag)) is not None:
            raise ValueError(f"the tag {tag!r} {problem}")
    if len(set(found)) > tags.MOST:
        raise ValueError(f"a run has at most {tags.MOST} tags")
    return tuple(sorted(set(found)))


def in_ci(environ: Mapping[str, str]) -> bool:
    """Whether this is continuous integration: every such service sets `CI`."""
    return environ.get("CI", "").strip().lower() in ("true", "1")


class _SecretInside(ValueError):
    """The value holds a secret: the message must not show it."""


OPTIONS: tuple[Option, ...] = (
    Option("server", "RANKSCOPE_SERVER", "http://127.0.0.1:8642", _url, "URL of the server"),
    Option(
        "token",
        "RANKSCOPE_TOKEN",
        None,
        _token,
        "bearer token with the right to write",
        secret=True,
    ),
    Option("project", "RANKSCOPE_PROJECT", "default", _name, "groups runs"),
    Option(
        "run",
        "RANKSCOPE_RUN",
        None,
        _name,
        "run id; by default from the launcher, the same on every rank",
    ),
    Option(
        "mode",
        "RANKSCOPE_MODE",
        "online",
        _mode,
        "online, offline (spool to disk only) or disabled (attach does nothing)",
    ),
    Option(
        "spool",
        "RANKSCOPE_SPOOL",
        default_spool,
        _folder,
        "where batches wait while the server is away; by default under the user's cache folder",
    ),
    Option(
        "overhead",
        "RANKSCOPE_OVERHEAD",
        0.01,
        _share,
        "largest share of step time that the agent may take; it thins its sampling to keep to it",
    ),
    Option(
        "allowance",
        "RANKSCOPE_ALLOWANCE",
        10,
        _seconds,
        "seconds of the agent's own time, once a run and rank, that are spent on sampling every "
        "step before `overhead` governs, lengthening steps by a quarter at most after the first "
        "fifth; 0: none; with `CI=true` the default is inf: every step is sampled",
        in_ci=math.inf,
    ),
    Option(
        "tensorboard",
        "RANKSCOPE_TENSORBOARD",
        None,
        _folder,
        "folder: also write each rank's scalars as TensorBoard events",
    ),
    Option(
        "console",
        "RANKSCOPE_CONSOLE",
        0,
        _lines,
        "last lines of each rank's console (up to 200) that stand beside an alert, secrets masked; "
        "0: none",
    ),
    Option(
        "git_diff",
        "RANKSCOPE_GIT_DIFF",
        False,
        _switch,
        "send what the working tree has beyond its commit, once, secrets masked",
    ),
    Option(
        "tags",
        "RANKSCOPE_TAGS",
        (),
        _tags,
        "words by which the run is found again; several as a list, or with commas between them",
    ),
)

_BY_NAME = {option.name: option for option in OPTIONS}
