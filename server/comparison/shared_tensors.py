"""Tensors that ranks hold alike although they hold different parts of others.

The normalisations of a tensor-parallel group, a tensor tied over two stages of a pipeline: their
holders belong to several replica classes, and model digests say nothing of them. They are compared
tensor by tensor, at steps at which fingerprints are posted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankscope.agent import wire
from rankscope.server.comparison import compare
from rankscope.server.comparison.replicas import Replicas
from rankscope.server.window import Comparison, Float64, Int64

# Elements that a bucket may have beside its share, and how far from whole rounding leaves a number.
_UNEVEN = 8
_WHOLE = 1e-6

_STAGES = ("start", "outside_optimizer", "reduced_gradient", "parameters")

_Tensor = tuple[str, tuple[int, ...], str]


@dataclass(frozen=True, slots=True)
class SharedSet:
    """Tensors that the same ranks hold.

    Attributes:
        ranks: more than one, of more than one replica class; ascending.
        tensors: names, shapes and shards, in the order of the lowest rank.
        alike: whether the models of the ranks have the same names throughout.
        declared: whether the user has said that they are replicas.
        beside_parts: those in whose module the ranks hold different parts of another tensor.
        classes: the ranks by replica class.
    """

    ranks: tuple[int, ...]
    tensors: tuple[_Tensor, ...]
    alike: bool
    declared: bool
    beside_parts: frozenset[_Tensor]
    classes: tuple[tuple[int, ...], ...]


class SharedTensors:
    """Compares them.

    Tensors of one name and shape on ranks with different models may still be strangers (stages of a
    pipeline that number their layers alike). They count as replicas where the user has said so;
    where the models have the same names throughout, so that only some tensors are cut, unless the
    ranks held other values from the start (stages may have as many layers of the same names); or
    from the time on at which they were seen to have one and the same gradient that is not zero.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._proven: set[tuple[tuple[int, ...], tuple[_Tensor, ...]]] = set()
        # Those that had other values on each rank when the monitor was attached.
        self._strange: set[tuple[tuple[int, ...], tuple[_Tensor, ...]]] = set()
        # Constants when they began, in a module of which ranks hold parts, with their digests: not
        # yet known to be replicas; and those of which each class was seen to own a slice.
        self._undecided: dict[tuple[tuple[int, ...], _Tensor], int] = {}
        self._slices: set[tuple[tuple[int, ...], _Tensor]] = set()
        # Whether the last comparison of a stage found them to differ.
        self._differed: dict[str, bool] = {}
        # The same for the comparisons of this window.
        self._outcomes: dict[str, list[tuple[int, bool]]] = defaultdict(list)
        self._known: tuple[bytes, int, tuple[SharedSet, ...]] = (b"", -1, ())

    def added(
        self,
        key: tuple[int, str],
        fingerprints: Mapping[int, Mapping[str, wire.Fingerprint]],
        ranks: Int64,
        made: list[Comparison],
    ) -> list[Comparison]:
        """Comparisons of one step and stage with what fingerprints say of these tensors.

        Args:
            fingerprints: by rank and table.
            made: comparisons of the replica classes; where one of them differs in more than what is
                held across them, the latter differs for that.
        """
        if key[1] not in _STAGES:
            return made
        compared = [
            self._compared(key, shared, fingerprints) for shared in self._shared_sets(ranks)
        ]
        known = [comparison for comparison in compared if comparison is not None]
        differing = [comparison for comparison in known if not comparison.equal]
        if known:
            self._outcomes[key[1]].append((key[0], bool(differing)))
        if differing and all(
            _is_in(of_class, differing[0]) for of_class in made if not of_class.equal
        ):
            # More ranks hold these tensors than are in one class: they show better who is wrong,
            # unless it has spread over the class by then.
            return differing[:1]
        # Where every rank is alone with its part, their agreement is all there is to report.
        return made or known[:1]

    def without_unknown(
        self, found: dict[tuple[int, str], Comparison]
    ) -> dict[tuple[int, str], Comparison]:
        """The comparisons of a window without those that say too much.

        Once such tensors differ, classes that agree do not show that these are equal again: only
        the next comparison of them does.
        """
        kept = {
            key: comparison
            for key, comparison in found.items()
            if not (comparison.equal and self._is_unknown(*key))
        }
        for stage, compared in self._outcomes.items():
            self._differed[stage] = compared[-1][1]
        self._outcomes.clear()
        return kept

    # ------------------------------------------------------------------------------------- inside

    def _is_unknown(self, step: int, stage: str) -> bool:
        compared = self._outcomes.get(stage, [])
        before = [differing for at, differing in compared if at < step]
        differing = before[-1] if before else self._differed.get(stage, False)
        return differing and all(at != step for at, _ in compared)

    def _shared_sets(self, ranks: Int64) -> tuple[SharedSet, ...]:
        known_for, version, sets = self._known
        if (known_for, version) != (ranks.tobytes(), self._replicas.version):
            sets = self._found(ranks)
            self._known = ranks.tobytes(), self._replicas.version, sets
        return sets

    def _found(self, ranks: Int64) -> tuple[SharedSet, ...]:
        classes = self._replicas.classes("parameters", ranks)
        if len(classes) < 2:
            return ()
        # All ranks of a class hold the same tensors.
        holders: dict[_Tensor, list[int]] = defaultdict(list)
        names: dict[int, frozenset[str]] = {}
        for number, rows in enumerate(classes):
            tensors = self._tensors(int(ranks[rows[0]]))
            names[number] = frozenset(name for name, _, _ in tensors)
            for tensor in tensors:
                holders[tensor].append(number)
        groups: dict[tuple[int, ...], list[_Tensor]] = defaultdict(list)
        for tensor, of_classes in holders.items():
            if len(of_classes) > 1:
                groups[tuple(of_classes)].append(tensor)
        sets = []
        for numbers, held in groups.items():
            members = np.sort(np.concatenate([ranks[classes[number]] for number in numbers]))
            alike = len({names[number] for number in numbers}) == 1
            # Modules of tensors that the same name stands for and that not all of these hold.
            of_parts = {
                _module(tensor)
                for tensor, of_classes in holders.items()
                if of_classes != [*numbers]
            }
            beside = frozenset(t for t in held if alike and _module(t) in of_parts)
            # What is read off a distributed tensor has an `@` in it.
            declared = all(shard and "@" not in shard for _, _, shard in held)
            of_ranks = tuple(tuple(ranks[classes[number]].tolist()) for number in numbers)
            sets.append(
                SharedSet(tuple(members.tolist()), tuple(held), alike, declared, beside, of_ranks)
            )
        return tuple(sets)

    def _tensors(self, rank: int) -> tuple[_Tensor, ...]:
        table = self._replicas.newest(rank)
        if table is None:
            return ()
        return tuple(zip(table.names, table.shapes, table.shards, strict=True))

    def _decide(
        self, stage: str, shared: SharedSet, picked: Mapping[int, wire.Fingerprint]
    ) -> None:
        """Which of the constants are slices that each class owns, and which are replicas.

        A slice gets the gradient of its own part from the first step on, other in each class and
        one within each. A replica's is one before anything can go wrong with it, and so is what a
        step makes of the constant: once that was seen, it has to stay so.
        """
        if len(picked) < len(shared.ranks) or shared.declared:
            return
        for place, tensor in enumerate(shared.tensors):
            key = shared.ranks, tensor
            if tensor not in shared.beside_parts:
                continue
            if stage != "start" and key not in self._undecided:
                continue
            held = [{int(picked[r].digests[place]) for r in ranks} for ranks in shared.classes]
            values = set.union(*held)
            sketch = picked[shared.ranks[0]].sketches
            if stage == "start":
                self._undecided.pop(key, None)
                constant = sketch is not None and _is_constant(sketch[place], math.prod(tensor[1]))
                if len(values) == 1 and constant:
                    self._undecided[key] = values.pop()
                continue
            trained = sketch is not None and bool(sketch[place].any())
            if stage == "parameters":
                trained = values != {self._undecided[key]}
            if len(values) == 1 and not trained:
                continue  # nothing shows it yet
            if len(values) == len(held) == sum(map(len, held)):
                self._slices.add(key)
            del self._undecided[key]

    def _compared(
        self,
        key: tuple[int, str],
        shared: SharedSet,
        fingerprints: Mapping[int, Mapping[str, wire.Fingerprint]],
    ) -> Comparison | None:
        picked: dict[int, wire.Fingerprint] = {}
        whole = 0
        for rank in shared.ranks:
            for name, made in fingerprints.get(rank, {}).items():
                table = self._replicas.table(rank, name)
                if table is None or len(table.names) != len(made.digests):
                    continue
                places = {
                    tensor: place
                    for place, tensor in enumerate(
                        zip(table.names, table.shapes, table.shards, strict=True)
                    )
                }
                held = [places[tensor] for tensor in shared.tensors if tensor in places]
                if len(held) < len(shared.tensors):
                    continue
                picked[rank] = _of_places(made, held)
                whole = max(whole, len(table.names))
        if len(picked) < 2:
            return None
        self._decide(key[1], shared, picked)
        kept = [n for n, t in enumerate(shared.tensors) if (shared.ranks, t) not in self._slices]
        if not kept:
            return None
        picked = {rank: _of_places(made, kept) for rank, made in picked.items()}
        tensors = [shared.tensors[place] for place in kept]
        labelled = compare.LabelledTable(
            tuple(name for name, _, _ in tensors),
            tuple(shape for _, shape, _ in tensors),
            ("parameters",) * len(tensors),
        )
        members = np.array(sorted(picked), dtype=np.int64)
        compared = compare.compare_fingerprints(
            *key, members, [picked[rank] for rank in members.tolist()], labelled
        )
        known = (shared.ranks, shared.tensors)
        if compared.equal and key[1] == "reduced_gradient" and len(picked) == len(shared.ranks):
            sketches = picked[shared.ranks[0]].sketches
            if sketches is not None and bool(sketches.any(axis=1).all()):
                self._proven.add(known)
        if key[1] == "start" and not compared.equal:
            self._strange.add(known)
        sure = shared.declared or (shared.alike and known not in self._strange)
        if not (sure or known in self._proven):
            return None
        # Out of all: they are a part of the model.
        return replace(compared, tensor_count=whole)


def _module(tensor: _Tensor) -> str:
    return tensor[0].rpartition(".")[0]


def _of_places(made: wire.Fingerprint, places: Sequence[int]) -> wire.Fingerprint:
    index = np.array(places, dtype=np.int64)
    sketches = None if made.sketches is None else made.sketches[index]
    return replace(made, digests=made.digests[index], sketches=sketches)


def _is_constant(sketch: Float64, elements: int) -> bool:
    """Whether all elements of a tensor are one number, as far as its sketch, [K], shows it.

    Each bucket adds up its share of them, with signs: of a constant that is a whole number of
    times the constant, no more than the bucket has elements, and odd in all buckets or even.
    """
    values = np.unique(sketch)
    if len(values) == 1:
        # Of anything but zeros the signs show.
        return not values.any()
    unit = float(np.diff(values).min()) / 2
    times = values / unit
    # Partly filled buckets are odd beside even ones: half of the number is the unit then.
    most = 2 * (elements // len(sketch) + _UNEVEN)
    whole = bool((np.abs(times - np.round(times)) < _WHOLE).all())
    return whole and float(np.abs(times).max()) <= most


def _is_in(part: Comparison, whole: Comparison) -> bool:
    """Whether all that differs between some ranks differs on fewer of them, asked of more ranks."""
    names = {tensor.name for tensor in whole.tensors}
    fewer = {*whole.deviating} < {*part.deviating}
    return bool(part.tensors) and fewer and all(t.name in names for t in part.tensors)
