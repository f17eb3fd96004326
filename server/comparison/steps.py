"""Compares what replicas hold at each step: numbers, then digests, then fingerprints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rankscope.agent import wire
from rankscope.server.comparison import compare
from rankscope.server.comparison.frozen import STAGE as FROZEN
from rankscope.server.comparison.frozen import Frozen
from rankscope.server.comparison.outside import STAGE as OUTSIDE
from rankscope.server.comparison.outside import Outside, unchanged_too, without_shares
from rankscope.server.comparison.replicas import REPLICATED, Replicas
from rankscope.server.comparison.shared_tensors import SharedTensors
from rankscope.server.window import Comparison, Int64, Series, joined_fingerprint

# Numbers that must be the same on all ranks after a step, the link they speak for, and how exactly.
COMPARED_SERIES = (
    ("grad_norm", "reduced_gradient", compare.NORM_TOLERANCE),
    ("lr", "hyperparameters", 1e-12),
    ("amp_scale", "hyperparameters", 1e-12),
)
# What shows from `grad_norm` what the gradient's norm was before clipping.
CLIPPING = ("grad_norm_preclip", "clip_coefficient")
# Workers of a parameter server count what they push: their gradients, and so the norms of these,
# are their own, and no reduction makes them equal.
PUSHED, _OWN = "pushes", "grad_norm"
# What the first steps of a warm-up (1/n, 2/n) change a rate by from one version to the next: some
# workers read it a little earlier or later than the version of which they post it.
_BETWEEN_VERSIONS = 0.5


class Comparisons:
    """What the ranks of a run that should hold the same are found to hold.

    Args:
        replicas: which ranks those are; learns of the run meanwhile.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._shared_tensors = SharedTensors(replicas)
        self._frozen = Frozen(replicas)
        self._outside = Outside(replicas)
        self._pushing: set[int] = set()

    def of(
        self,
        series: Mapping[str, Series],
        all_digests: Mapping[str, Series],
        fingerprints: Iterable[
            tuple[tuple[int, str], Mapping[int, Mapping[str, wire.Fingerprint]]]
        ],
        ranks: Int64,
        steps: Int64,
    ) -> dict[tuple[int, str], Comparison]:
        """All comparisons of some steps, by step and stage.

        Args:
            series, all_digests: numbers and digests at these steps.
            fingerprints: by step and stage, then by rank and table; in the order of steps.
            ranks: rows of the series, [R].
            steps: their columns, [S].
        """
        found: dict[tuple[int, str], Comparison] = {}
        # What is not the same everywhere, class by class.
        parts: dict[tuple[int, str], dict[int, Comparison]] = {}
        series = self._without_pushed(series, ranks)
        for metric, stage, tolerance in COMPARED_SERIES:
            if metric in series:
                if metric == "lr" and self._pushing:
                    tolerance = _BETWEEN_VERSIONS
                of_metric: dict[tuple[int, str], Comparison] = {}
                by_value = partial(compare.compare_values, tolerance=tolerance)
                self._compare(of_metric, parts, series[metric], stage, by_value, ranks, steps)
                # Of the numbers that speak for a link, one that differs counts.
                differing = {key: c for key, c in found.items() if not c.equal}
                found |= of_metric | differing
        self._attribute_to_clipping(found, series, ranks, steps)
        of_digests: dict[tuple[int, str], Comparison] = {}
        for stage, digests in all_digests.items():
            if stage in REPLICATED:
                self._compare(
                    of_digests, parts, digests, stage, compare.compare_digests, ranks, steps
                )
        # Not every setting that is compared as a number is in the digest of all settings.
        differing = {k: c for k, c in found.items() if k[1] == "hyperparameters" and not c.equal}
        found |= of_digests | differing
        changes: dict[tuple[int, str], Mapping[int, Mapping[str, wire.Fingerprint]]] = {}
        for key, taken in fingerprints:
            if key[1] == OUTSIDE:
                changes[key] = taken
                taken = unchanged_too(taken, all_digests.get(OUTSIDE), ranks, steps, key[0])
            if key[1] == FROZEN:
                taken = self._frozen.filled(taken)
            known, whole = parts.get(key, {}), found.get(key)
            made: list[Comparison] = []
            for number, rows in enumerate(self._replicas.classes(key[1], ranks)):
                members = ranks[rows]
                of_members = {rank: taken[rank] for rank in members.tolist() if rank in taken}
                of_class = known.get(number)
                if of_class is None and whole is not None and whole.equal and len(members) > 1:
                    if self._replicas.whole(key[1], members):
                        of_class = compare.agreed(*key, members)
                compared = self._with_fingerprints(
                    key, of_class, of_members, exact=key in of_digests
                )
                if compared is not None:
                    made.append(without_shares(compared) if key[1] == OUTSIDE else compared)
            if key[1] == FROZEN:
                frozen = self._frozen.compared(
                    key, taken, ranks, compare.merged(made) if made else None
                )
                if frozen is not None:
                    found[key] = frozen
                continue
            made = self._shared_tensors.added(key, taken, ranks, made)
            if made:
                # Gradients are fingerprinted as they were applied.
                clipped = (key[0], "clipped_gradient")
                stage = "clipped_gradient" if clipped in found else key[1]
                if key[1] != "reduced_gradient" or clipped not in found:
                    found[key] = compare.merged(made)
                else:
                    found[clipped] = replace(compare.merged(made), stage=stage)
        if OUTSIDE in all_digests:
            written = self._outside.found(all_digests[OUTSIDE], changes, ranks, steps)
            found |= {k: c for k, c in written.items() if k not in found or found[k].equal}
        return self._shared_tensors.without_unknown(found)

    def _without_pushed(self, series: Mapping[str, Series], ranks: Int64) -> Mapping[str, Series]:
        """Without the norms of gradients that ranks push, and do not reduce."""
        pushes, norms = series.get(PUSHED), series.get(_OWN)
        own = np.isin(ranks, list(self._pushing))[:, None]
        if pushes is not None:
            # From the first one on, at all versions.
            own = own | np.logical_or.accumulate(pushes.present, axis=1)
            self._pushing.update(ranks[pushes.present.any(axis=1)].tolist())
        if norms is None or not self._pushing:
            return series
        return {**series, _OWN: Series(norms.values, norms.present & ~own)}

    def _attribute_to_clipping(
        self,
        found: dict[tuple[int, str], Comparison],
        series: Mapping[str, Series],
        ranks: Int64,
        steps: Int64,
    ) -> None:
        """Where gradients differ as they were applied, but not before clipping, that link broke.

        A rank that posts no norm before clipping has not clipped.
        """
        applied, before = series.get("grad_norm"), series.get("grad_norm_preclip")
        if applied is None or before is None:
            return
        factors = series.get("clip_coefficient")
        for key in [k for k, c in found.items() if k[1] == "reduced_gradient" and not c.equal]:
            column = int(np.searchsorted(steps, key[0]))
            rows = np.flatnonzero(np.isin(ranks, found[key].ranks) & applied.present[:, column])
            clipped = before.present[rows, column]
            if not clipped.any():
                continue
            after, norm = applied.values[rows, column], before.values[rows, column]
            whole = [np.where(clipped, norm, after)]
            if factors is not None:
                # Of the tensors that were clipped, which need not be all of them: their norm is
                # what it was and no longer what it was times the factor.
                factor = np.where(factors.present[rows, column], factors.values[rows, column], 1.0)
                with np.errstate(invalid="ignore", over="ignore"):
                    squares = after**2 + (1 - factor**2) * norm**2
                    whole.append(np.where(clipped, np.sqrt(squares), after))
            for norms in whole:
                # Clipping adds the squares up in another order than the norm of what was applied.
                reduced = compare.compare_values(
                    *key, ranks[rows], norms, tolerance=10 * compare.NORM_TOLERANCE
                )
                if reduced.equal:
                    found[key[0], "clipped_gradient"] = replace(
                        found[key], stage="clipped_gradient"
                    )
                    found[key] = reduced
                    break

    def _compare(
        self,
        found: dict[tuple[int, str], Comparison],
        parts: dict[tuple[int, str], dict[int, Comparison]],
        aligned: Series,
        stage: str,
        compared: Callable[[int, str, Int64, Any], Comparison],
        ranks: Int64,
        steps: Int64,
    ) -> None:
        """Compares one number a rank and step, at all steps at which two replicas have one."""
        classes = {
            number: rows
            for number, rows in enumerate(self._replicas.classes(stage, ranks))
            if len(rows) > 1 and self._replicas.whole(stage, ranks[rows])
        }
        same = np.ones(len(steps), dtype=bool)
        some = np.zeros(len(steps), dtype=bool)
        for rows in classes.values():
            values, present = aligned.values[rows], aligned.present[rows]
            counts = present.sum(axis=0)
            same &= compare.same_columns(values, present) & (counts == len(rows))
            some |= counts > 1
        if not some.any():
            return
        # What all ranks agree on, which is nearly always all of it, shares its arrays.
        everyone = np.sort(np.concatenate(list(classes.values())))
        agreed = compare.agreed(0, stage, ranks[everyone])
        for column in np.flatnonzero(some).tolist():
            step = int(steps[column])
            if same[column]:
                found[step, stage] = replace(agreed, step=step)
                parts.pop((step, stage), None)
                continue
            of_step: dict[int, Comparison] = {}
            for number, rows in classes.items():
                there = rows[aligned.present[rows, column]]
                if len(there) > 1:
                    values = aligned.values[there, column]
                    of_step[number] = compared(step, stage, ranks[there], values)
            # Digests come after norms, and are the ones that count.
            parts[step, stage] = of_step
            whole = compare.merged(list(of_step.values()))
            if stage == "outside_optimizer" and not whole.equal:
                whole = self._written(whole, ranks, aligned, column)
            found[step, stage] = whole

    def _written(
        self, differing: Comparison, ranks: Int64, aligned: Series, column: int
    ) -> Comparison:
        """Who wrote parameters between two steps, asked of all that hold parts of the model.

        Where nothing was written on most of them (their digest is 0), and on none but some of those
        that differ from their replicas, it is these that did.
        """
        for rows in self._replicas.classes("hyperparameters", ranks):
            there = rows[aligned.present[rows, column]]
            digests = aligned.values[there, column]
            wrote = set(ranks[there[digests != 0]].tolist())
            if len(there) > len(differing.ranks) and 2 * len(wrote) < len(there):
                if wrote and wrote <= set(differing.ranks.tolist()) <= set(ranks[there].tolist()):
                    return compare.compare_digests(
                        differing.step, differing.stage, ranks[there], digests
                    )
        return differing

    def _with_fingerprints(
        self,
        key: tuple[int, str],
        known: Comparison | None,
        fingerprints: Mapping[int, Mapping[str, wire.Fingerprint]],
        *,
        exact: bool,
    ) -> Comparison | None:
        """The comparison at a step and stage, with what fingerprints add to it.

        Args:
            known: what model digests, or numbers, came to.
            fingerprints: by rank and table.
            exact: whether that were digests, which see every bit.
        """
        equal_tables = compare.largest_equal(fingerprints)
        if not equal_tables:
            return known
        rank, first = next(iter(equal_tables.items()))
        table = compare.joined_table(
            {name: self._replicas.described(rank, made) for name, made in sorted(first.items())}
        )
        joined = {rank: joined_fingerprint(of_rank) for rank, of_rank in equal_tables.items()}
        own = None
        if len(joined) > 1:
            ranks = np.array(list(joined), dtype=np.int64)
            own = compare.compare_fingerprints(*key, ranks, list(joined.values()), table)
        if known is None or (own is not None and len(joined) >= len(known.ranks)):
            return own
        if known.equal and not exact:
            # A norm does not see everything that the digests of some of the ranks do.
            return known if own is None or own.equal else own
        return compare.with_fingerprints(known, joined, table)
