"""Modules that a training has in evaluation mode: what it posts of norms and dropouts."""

from __future__ import annotations

from tests.support.runs.posted import Said

_NORMS, _DROPS = ("first.norm", "second.norm"), ("embed.drop", "head.drop")


def tell_mode(said: Said, fault: str, step: int, at: int, *, concerned: bool) -> None:
    """Scalar and events of a model with two norms and two dropouts."""
    everything = _NORMS if fault.startswith("only-") else (*_NORMS, *_DROPS)
    before: tuple[str, ...] = ()
    after: dict[int, tuple[str, ...]] = {at: everything}
    if fault == "forgotten-by-one" and not concerned:
        after = {}
    elif fault == "remembered-by-one":
        after = {} if concerned else after
    elif fault == "forgotten-for-a-while":
        after[at + 30] = ()
    elif fault == "forgotten-once":
        after[at + 1] = ()
    elif fault in ("from-the-start", "only-new-norms", "only-trained-norms"):
        before, after = everything, {}
    elif fault == "norms-from-the-start":
        before, after = _NORMS, {}
    elif fault == "norms-frozen":
        after = {at: _NORMS}
    elif fault == "dropout-forgotten":
        before, after = _NORMS, {at: (_NORMS[0], _NORMS[1], _DROPS[0])}
    elif fault == "none":
        after = {}
    told = {0: before, **after}
    names = told[max(s for s in told if s <= step)]
    of = 0 if fault == "without-modules" else len(everything)
    names = names if of else ()
    if of:
        said.scalars["modules_in_eval"] = len(names) / of
    if step in told:
        data = {
            "whole": bool(told[step] == everything),
            "names": list(names),
            "count": len(names),
            "of": of,
            "normalization": sum(n in _NORMS for n in names),
            "dropout": sum(n in _DROPS for n in names),
            "own": 0,
            "new": len(names) if fault == "only-new-norms" else 0,
        }
        said.events.append(("mode.changed", "modes", data))
