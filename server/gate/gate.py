"""`rankscope gate RUN`: a run's verdict as the exit code that a pipeline goes by."""

from __future__ import annotations

import argparse
import difflib
import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from urllib.parse import quote

from rankscope.client.errors import NotRankscope, Problem, Unreachable
from rankscope.client.http import Http
from rankscope.server.alerts.verdict import counts
from rankscope.server.detectors.registry import KINDS
from rankscope.server.gate.formats import FORMATS, REGRESSION, Report
from rankscope.server.which_server import add_server

PASS, FAIL, USAGE, UNREACHABLE, UNDECIDED = range(5)

EXIT_CODES = {"pass": PASS, "fail": FAIL, "pending": UNDECIDED}
_POLL_SECONDS = 1.0
# A run that has ended is waited for so long whatever was asked for, while the server evaluates what
# it has of it: that takes a second or two, and minutes on a machine that others keep busy.
_EVALUATION_SECONDS = 300.0
_EXIT_TEXT = """\
exit code: 0 the run passes; 1 it fails; 2 usage; 3 the server cannot be reached; 4 there is no such
run, or not enough data to judge it yet. A run passes when nothing was found and each check that is
required was made; the output names these, and what was not checked, with the reasons.
"""

Json = dict[str, Any]


class NoVerdict(Exception):
    """There is no verdict; `code` says why, as an exit code of the gate."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def gate(argv: Sequence[str]) -> int:
    """Prints the verdict on a run and returns the exit code."""
    options = _options(argv)
    try:
        report = waited_for(_Server(options.server, options.token), options, _report_waiting)
    except NoVerdict as none:
        print(f"rankscope gate: {none}", file=sys.stderr)
        return none.code
    show(report, options.format)
    return EXIT_CODES[report.verdict]


def _report_waiting(seconds: float, why: str) -> None:
    print(f"rankscope gate: waiting up to {seconds:.0f} s: {why}", file=sys.stderr)


def verdict_on(run: str, arguments: Sequence[str] = ()) -> Report:
    """The verdict on a run, as the command `gate` comes to it.

    Args:
        run: its id.
        arguments: those of the command, such as `--server URL` and `--wait 60`.

    Raises:
        NoVerdict: there is none.
        SystemExit: the arguments cannot work.
    """
    options = _options([*arguments, "--", run])
    return waited_for(_Server(options.server, options.token), options, lambda *waiting: None)


def waited_for(
    server: Answers, options: argparse.Namespace, waiting: Callable[[float, str], None]
) -> Report:
    """The verdict that the options ask for, as soon as there is one or the wait is over.

    Args:
        server: which is asked.
        options: of the command.
        waiting: called where there has to be waited, once: for how many seconds, and for what.

    Raises:
        NoVerdict: there is none.
    """
    began = time.monotonic()
    reported = False
    while True:
        report: Report | None = None
        problem: NoVerdict | None = None
        try:
            report = report_of(server, options)
        except NoVerdict as none:
            problem, code, message = none, none.code, str(none)
        else:
            code, message = EXIT_CODES[report.verdict], "; ".join(report.reasons)
        patience = options.wait
        # What was found may be over in what the server has yet to read.
        decided = code not in (UNREACHABLE, UNDECIDED)
        if report is not None and report.is_being_evaluated:
            patience, decided = max(patience, _EVALUATION_SECONDS), False
        left = began + patience - time.monotonic()
        if decided or left <= 0:
            break
        if not reported:
            waiting(left, message)
            reported = True
        time.sleep(min(_POLL_SECONDS, left))
    if report is None:
        assert problem is not None
        raise problem
    return _against(server, report, options) if options.against else report


def _against(server: Answers, report: Report, options: argparse.Namespace) -> Report:
    """The verdict with what the comparison with earlier runs adds.

    Raises:
        NoVerdict: the server does not answer.
    """
    from rankscope.server.gate import against

    try:
        return against.with_baseline(server, report, options)
    except NoVerdict as ended:
        if ended.code != UNDECIDED:
            raise
        return against.not_compared(report, str(ended))


def show(report: Report, form: str) -> None:
    """Prints a verdict in one of `FORMATS`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A log that cannot show a letter must not turn a verdict into a traceback.
        sys.stdout.reconfigure(errors="backslashreplace")
    print(FORMATS[form](report))


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.run in options.against:
        parser.error(f"{options.run!r} is the run itself, and no baseline for it")
    # What is compared with a baseline is no kind of alert: the server does not know it.
    options.measures = options.ignored_measures = ()
    if options.against:
        options.kind, options.measures = _split(options.kind)
        options.ignore, options.ignored_measures = _split(options.ignore)
    return options


def _split(kinds: Sequence[str]) -> tuple[list[str], list[str]]:
    """Kinds of alerts, and names of measures without `regression.`."""
    prefix = f"{REGRESSION}."
    measures = [kind.removeprefix(prefix) for kind in kinds if kind.startswith(prefix)]
    return [kind for kind in kinds if not kind.startswith(prefix)], measures


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankscope gate",
        description="Passes or fails a run, for CI.",
        epilog=_EXIT_TEXT,
    )
    parser.add_argument("run", metavar="RUN", help="id of the run")
    add_server(parser)
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for the server, the run and its end (default: 0); the evaluation of "
        "a run that has ended is waited for anyway",
    )
    parser.add_argument(
        "--against",
        type=_baseline,
        default=(),
        metavar="BASELINE",
        help="compare with earlier runs, too, and fail where this one trains worse: a run's id, "
        "several with commas between them (other seeds of the same training), or project:NAME, the "
        "baselines of a project (`rankscope baseline`), 20 at most; --kind and --ignore take the "
        "names of these checks, regression.loss and so on",
    )
    parser.add_argument(
        "--tolerance",
        type=_part,
        default=0.02,
        metavar="SHARE",
        help="by what share of the baseline's loss or accuracy a run may be worse, whatever the "
        "spread of the baseline is (default: 0.02)",
    )
    add_judging(parser)
    return parser


def add_judging(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say what fails, and how that is printed."""
    parser.add_argument(
        "--fail-on",
        choices=("warning", "critical"),
        default="warning",
        help="lowest severity that fails (default: warning)",
    )
    parser.add_argument(
        "--kind",
        type=_kind,
        action="append",
        default=[],
        help="judge by this kind of alert alone, which is then required; may be repeated",
    )
    parser.add_argument(
        "--ignore",
        type=_kind,
        action="append",
        default=[],
        metavar="KIND",
        help="ignore this kind of alert; may be repeated",
    )
    parser.add_argument("--format", choices=tuple(FORMATS), default="text", help="default: text")


def _kind(text: str) -> str:
    group, dot, _ = text.partition(".")
    # Kinds of other packages' detectors are the server's to know.
    theirs = dot and group not in {kind.partition(".")[0] for kind in KINDS}
    if text in KINDS or theirs:
        return text
    close = difflib.get_close_matches(text, KINDS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; the kinds are {', '.join(KINDS)}"
    raise argparse.ArgumentTypeError(f"there is no kind {text!r}{hint}")


def _baseline(text: str) -> tuple[str, ...]:
    # A project may have a comma in its name.
    names = [text] if text.startswith("project:") else text.split(",")
    if any(name.strip() in ("", ".", "..", "project:") for name in names):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no baseline: write RUN, RUN,RUN,RUN or project:NAME"
        )
    return tuple(dict.fromkeys(name.strip() for name in names))


def _part(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write 0.02 for 2 %")
    return share


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


class _Server:
    """Reads from the REST interface, and knows what a refusal means for the gate."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self._http = Http(url, token)

    def get(self, path: str, query: Sequence[tuple[str, str]] = ()) -> Json:
        """The answer to a request.

        Raises:
            NoVerdict: there is none.
        """
        try:
            return self._http.json("GET", f"/api/v1{path}", query)
        except Unreachable as error:
            text = f"the server {self.url} cannot be reached: {error}"
            raise NoVerdict(UNREACHABLE, text) from error
        except NotRankscope as error:
            raise self._not_an_answer(error.status) from error
        except Problem as error:
            raise self._refusal(error) from error

    def _not_an_answer(self, status: int) -> NoVerdict:
        if status in (401, 403):
            return NoVerdict(USAGE, f"the server {self.url} refuses the token: status {status}")
        # A 404 without a problem comes from some other service at this address.
        if status in (200, 404):
            return NoVerdict(UNREACHABLE, f"what answers at {self.url} is no Rankscope server")
        return NoVerdict(UNREACHABLE, f"the server {self.url} cannot answer: status {status}")

    def _refusal(self, problem: Problem) -> NoVerdict:
        if problem.status == 404:
            return NoVerdict(UNDECIDED, problem.detail)
        if problem.status in (401, 403):
            return NoVerdict(USAGE, f"the server {self.url} refuses the token: {problem.detail}")
        if problem.status in (400, 422):
            return NoVerdict(USAGE, problem.detail)
        return NoVerdict(UNREACHABLE, f"the server {self.url} cannot answer: {problem.detail}")


class Answers(Protocol):
    """Answers what the REST interface would."""

    url: str

    def get(self, path: str, query: Sequence[tuple[str, str]] = ()) -> Json:
        """The answer to a request below /api/v1."""


def report_of(server: Answers, options: argparse.Namespace) -> Report:
    """The verdict on `options.run`, by what `add_judging` has read.

    Raises:
        NoVerdict: there is none.
    """
    if options.run in ("", ".", ".."):  # would be another address
        raise NoVerdict(
            USAGE, f"{options.run!r} is no id of a run; `rankscope runs` lists the runs there are"
        )
    path = f"/runs/{quote(options.run, safe='')}"
    query = [("fail_on", options.fail_on)]
    query += [("kind", kind) for kind in options.kind]
    query += [("ignore", kind) for kind in options.ignore]
    verdict = server.get(f"{path}/verdict", query)
    if verdict.get("verdict") not in EXIT_CODES:
        raise NoVerdict(UNREACHABLE, f"what answers at {server.url} is no Rankscope server")
    return Report(
        run=options.run,
        address=f"{server.url}{path}",
        verdict=verdict["verdict"],
        reasons=tuple(verdict["reasons"]),
        checks=tuple(verdict["checks"]),
        alerts=tuple(_counted(list(_alerts(server, path)), verdict)),
        required=tuple(verdict.get("required", ())),
        state=verdict.get("state", ""),
        evaluated=verdict.get("evaluated", True),
        sampled=verdict.get("sampled"),
        not_seen=verdict.get("not_seen") or "",
        fail_on=options.fail_on,
        kinds=frozenset(options.kind),
        ignored=frozenset(options.ignore),
    )


def _counted(alerts: Sequence[Json], verdict: Json) -> list[Json]:
    """The alerts of the job's last start; all, where an older server reports no starts."""
    if "start" not in verdict:
        return list(alerts)
    of = {
        "first": verdict.get("first_start", verdict["start"]),
        "last": verdict["start"],
        "resumed_step": verdict.get("resumed_step"),
    }
    ids = set()
    for a in alerts:
        if counts(a["state"], a.get("start", 0), a["last_step"], **of):
            ids |= {a["id"], a["parent"]}
    return [a for a in alerts if a["id"] in ids]


def _alerts(server: Answers, path: str) -> Iterator[Json]:
    """All alerts of the run with what follows from them, newest first."""
    query = [("consequences", "true"), ("limit", "100")]
    cursor: str | None = None
    while True:
        page = server.get(f"{path}/alerts", [*query, *([("cursor", cursor)] if cursor else [])])
        yield from page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return
