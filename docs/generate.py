"""Writes the pages of the documentation that say what the code says: `make docs`.

`tests/test_docs.py` compares them with what stands in the repository.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from docs import client_models, interfaces, kinds
from docs.markdown import NOTICE, sections, table
from rankscope.agent.cli import COMMANDS
from rankscope.agent.options import OPTIONS
from rankscope.agent.probes import PROBES
from rankscope.agent.schedule import TIERS
from rankscope.agent.wire import LIMITS
from rankscope.server.api import batch_schema as schema
from rankscope.server.demo.faults import DEFAULT_FAULT, FAULTS
from rankscope.server.detectors.profiles import PROFILES

DOCS = Path(__file__).parent
MODELS = DOCS.parent / "client" / "models"
README = DOCS.parent / "README.md"
SETTINGS = DOCS / "detector-settings.md"


def signals() -> str:
    """What the agent records: the docstrings of the probes."""
    lines = [
        "# What the agent records",
        "",
        NOTICE,
        "",
        "Each family of signals is a probe in a file of its own (`agent/probes/`). A probe that",
        "fails is switched off, reported once on the run's page, and leaves the others alone.",
        "",
        "What is recorded at every step and what is sampled is decided by five tiers, from",
        f"cheap to dear: {', '.join(f'`{t}`' for t in TIERS)}.",
        "A tier with the interval 2^k is due at steps divisible by 2^k, together with all tiers",
        "before it. The agent measures what each tier costs and chooses the intervals so that all",
        "of them together stay within `overhead` of the step time, and what is done at every step",
        "within 45 % of that. Before that `allowance` is spent (10 s of the agent's own time, once",
        "a run and rank) on samples of all tiers: a fifth of it at every step, the rest at steps",
        "divisible by a power of two, such that steps become longer by a quarter at most on",
        "average. With `CI=true` every step of a run is sampled, unless `allowance` is given. The",
        "first 8 steps of a process are sampled whole in any case; losses and rates of the first",
        "1,024 steps are recorded whatever the interval and however long they take;",
        "and the server asks for everything where it has found something. A value far outside its",
        "own recent past (ten scaled median deviations of the last 32) of loss, gradient norms,",
        "clip coefficient, loss scale or step time, or a new number of samples or steps, trips a",
        "wire: the next 16 steps are sampled in full at once, at most eight times and once more",
        "each 1,024 steps, and the server passes it on to the other ranks. After 2,048 steps or",
        "20 s a run is under way: then a tier takes at most 8 % of `overhead`, or 30 % where that",
        "is enough for every step, unless it is due every two to six seconds only; and a sample",
        "that takes more than 10 times `overhead` of a step by the agent's own measure (a tenth of",
        "it, by default; caches that are cold afterwards make it up to a fifth) comes at one step",
        "in 4,096, but every 48 s at least. The run's page shows the intervals in force.",
        "",
        "Losses are averaged over a step's micro-batches. Series with a tensor in their name",
        "(`grad_norm/conv1.weight`) are one number a tensor. Digests and fingerprints are not",
        "shown themselves: the server compares them between the ranks.",
        "",
        "On a device nothing waits: what it computes is copied beside the training and posted a",
        "step or two later. (Devices other than CUDA have no such copies, and do wait, at sampled",
        "steps.) `agent.start` reads arrays where the caller has them, at sampled steps: that",
        "waits for their device.",
    ]
    for probe in PROBES:
        lines += ["", f"## {probe.name}", "", *sections(_described(probe))]
    return "\n".join(lines) + "\n"


def _described(probe: type) -> str:
    """The docstring of a probe without its attributes: they are of its code, and no signal."""
    return (inspect.getdoc(probe) or "").partition("\n\nAttributes:\n")[0]


def reference() -> str:
    """Tables of commands, options and faults."""
    return "\n".join(
        [
            "# Reference",
            "",
            NOTICE,
            "",
            "## Options of `attach`",
            "",
            "Argument before environment variable before default.",
            "",
            *table(
                ("option", "variable", "default", "meaning"),
                ((f"`{o.name}`", f"`{o.variable}`", _default(o.default), o.help) for o in OPTIONS),
            ),
            "",
            "## Options of `rankscope serve`",
            "",
            *interfaces.serve_options(),
            "",
            "Where nothing is given, the database is `rankscope.db` in the user's data folder.",
            "",
            "## Commands",
            "",
            "`rankscope COMMAND --help` lists the arguments.",
            "",
            *table(
                ("command", "does", "needs"),
                (
                    (f"`rankscope {c.name}`", c.help, f"`rankscope[{c.extra}]`" if c.extra else "-")
                    for c in COMMANDS
                ),
            ),
            "",
            "## Faults of the demo",
            "",
            "`rankscope demo --fault NAME`; the seed decides rank, step and tensor.",
            "",
            *_faults(),
            "",
        ]
    )


def limits() -> str:
    """The table of what a batch may be at most."""
    return "\n".join(
        [
            "# Limits of a batch",
            "",
            NOTICE,
            "",
            "What `POST /api/v1/ingest` takes at most. What is over a limit is refused before",
            "anything is built of it, with status 422 (413 for a body that is too long) and a",
            "problem that names the field in `errors[].where`. The agent keeps to the limits by",
            "itself: it cuts texts, and leaves out the longest values of a configuration and the",
            "largest tables where they do not fit, which `config.left_out` then names.",
            "",
            "The table is `agent/wire/limits.py`.",
            "",
            *table(
                ("fields", "at most", "unit", "because"),
                (
                    (
                        ", ".join(f"`{field}`" for field in limit.fields),
                        f"{limit.most:,}",
                        limit.unit or "-",
                        limit.because,
                    )
                    for limit in LIMITS
                ),
            ),
            "",
        ]
    )


def profiles() -> str:
    """The page of the detectors' settings with its table of profiles as it has to be."""
    return _between(SETTINGS.read_text(encoding="utf-8"), "profiles", _profiles())


def _profiles() -> list[str]:
    def listed(kinds: Iterable[str]) -> str:
        return ", ".join(f"`{kind}`" for kind in kinds) or "-"

    return table(
        ("profile", "the loss is", "does not apply", "information at most"),
        (
            (f"`{name}`", p.what, listed(p.without), listed(sorted(p.lenient)))
            for name, p in PROFILES.items()
        ),
    )


def _between(text: str, what: str, lines: Sequence[str]) -> str:
    """A page by hand with the generated lines between their marks."""
    begin, end = f"<!-- {what}: begin -->\n", f"<!-- {what}: end -->\n"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return "".join([before, begin, "\n".join(lines), "\n", end, after])


def batch_schema() -> str:
    """The JSON of a batch as JSON Schema, for validators and generators of code."""
    return json.dumps(schema.document(), indent=2, ensure_ascii=False) + "\n"


PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "detectors.md": kinds.overview,
    **{DOCS / "kinds" / f"{kind}.md": partial(kinds.page, kind) for kind in kinds.KINDS},
    SETTINGS: profiles,
    DOCS / "reference.md": reference,
    DOCS / "signals.md": signals,
    DOCS / "limits.md": limits,
    DOCS / "python-api.md": interfaces.python,
    DOCS / "rest.md": interfaces.rest,
    DOCS / "batch.schema.json": batch_schema,
    **{MODELS / f"{name}.py": partial(str, text) for name, text in client_models.sources().items()},
}


def main() -> None:
    """Writes every page, and removes those of kinds that are no more."""
    for path in set((DOCS / "kinds").glob("*.md")) - set(PAGES):
        path.unlink()
    for path, page in PAGES.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(page(), encoding="utf-8")
        sys.stdout.write(f"{path.relative_to(README.parent)}\n")


def _faults() -> list[str]:
    return table(
        ("fault", "what happens", "where", "expected alert", "which names"),
        (
            (
                f"`{f.name}`" + (" (default)" if f.name == DEFAULT_FAULT else ""),
                f.what,
                f.where,
                " or ".join(f"`{kind}`" for kind in f.kinds) or "none",
                _named(f.names_rank, f.names_tensor, f.tolerance) if f.kinds else "-",
            )
            for f in FAULTS.values()
        ),
    )


def _default(default: object) -> str:
    if callable(default):
        return "a folder under the user's cache folder"
    return "none" if default in (None, ()) else f"`{default}`"


def _named(rank: bool, tensor: bool, tolerance: int) -> str:
    step = "the very step" if tolerance == 0 else f"the step, within {tolerance}"
    return ", ".join(["the rank"] * rank + [step] + ["the tensor"] * tensor)


if __name__ == "__main__":
    main()
