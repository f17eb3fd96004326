"""What a case is: an injection with everything about it decided, and what has to be said of it.

What is expected comes from the catalogue of faults and from the contract (which kind a broken link
has, which ranks are suspects), never from what the system says. No torch in here.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

SEVERITIES = ("info", "warning", "critical")
MODELS = ("mlp", "cnn", "transformer")

# At its default the agent samples one in 64 of steps as short as these, or more.
_LONGER = 100

# Tensors that a fault chooses from: the weights that every step of the model moves.
WEIGHTS = {
    "mlp": ("inner.weight", "hidden.weight", "head.weight"),
    "cnn": ("conv1.weight", "conv2.weight", "head.weight"),
    "transformer": ("attend.weight", "mix.weight", "widen.weight", "narrow.weight", "head.weight"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a case is run with.

    Attributes:
        world: number of ranks.
        rank: of this process; -1 where nothing is trained.
        model: one of `MODELS`.
        run: run id.
        server: URL.
        full: everything is sampled at every step.
        folder: for checkpoints and spools; the same on all ranks.
        launch: how often the job has been started before.
    """

    world: int
    model: str
    seed: int
    rank: int = -1
    run: str = ""
    server: str = ""
    full: bool = False
    folder: str = ""
    launch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the one root alert has to say.

    Attributes:
        kinds: it is of one of these; empty: there must be no alert (of `severity` or above).
        stages: its stage is one of these; empty: no stage is asked for.
        ranks: it names exactly one of these sets.
        tensors: it names exactly these; None: it may name any.
        step: the first step that goes wrong.
        tolerance: steps by which its first step may lie from there: 0 for what is compared bit by
            bit; more where only statistics show it.
        severity: the least.
        ceiling: the highest.
    """

    kinds: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    ranks: tuple[frozenset[int], ...] = ()
    tensors: frozenset[str] | None = None
    step: int = 0
    tolerance: int = 0
    severity: str = "warning"
    ceiling: str = "critical"


class Case:
    """One line of the catalogue. Subclasses say how it is trained.

    Attributes:
        id: as in the catalogue; a further variant has a letter after it.
        what: what is injected where, in one line.
        models: families of models that can show it.
        worlds: numbers of ranks that it can be done with.
        steps: length of the training where all steps are sampled.
        onset: first step that is touched; None: chosen by the seed.
        launches: number of launches of its own processes; 0: it runs in the pool.
        hangs: its ranks end by waiting in vain: it can run beside others.
        settle: seconds to wait for an alert after the end; for what only silence shows.
    """

    id: ClassVar[str]
    what: ClassVar[str]
    family: ClassVar[str] = ""
    models: ClassVar[tuple[str, ...]] = MODELS
    worlds: ClassVar[tuple[int, ...]] = (2, 4)
    steps: ClassVar[int] = 60
    onset: ClassVar[int | None] = None
    launches: ClassVar[int] = 0
    hangs: ClassVar[bool] = False
    settle: ClassVar[float] = 0.0

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.world, self.rank, self.seed = setting.world, setting.rank, setting.seed

    def expected(self) -> Expected:
        """What has to be said of it."""
        raise NotImplementedError

    def complaint(self, ended: Sequence[Sequence[str | None]]) -> str:
        """What speaks against the lab itself, of the ends of all ranks of all launches.

        A case whose processes end on purpose overrides it.
        """
        for launch in ended:
            for rank, text in enumerate(launch):
                if text != "":
                    return f"rank {rank}: {text or 'gave no answer'}"
        return ""

    # ------------------------------------------------------------------- what the seed decides

    @cached_property
    def _choice(self) -> tuple[int, float, str]:
        drawn = random.Random(f"{self.id}/{self.world}/{self.setting.model}/{self.seed}")
        return (
            drawn.randrange(self.world),
            drawn.random(),
            drawn.choice(WEIGHTS[self.setting.model]),
        )

    @property
    def suspects(self) -> int:
        """The rank that is broken, where it is one."""
        return self._choice[0]

    @property
    def is_target(self) -> bool:
        """Whether that is this process."""
        return self.rank == self.suspects

    @property
    def at(self) -> int:
        """The step at which it begins: in the middle, at no round number."""
        if self.onset is not None:
            return self.onset
        return self.steps * 2 // 5 + int(self._choice[1] * self.steps / 5)

    @property
    def length(self) -> int:
        """Steps of the training: at default sampling long enough for a further sample of them."""
        return self.steps if self.setting.full else self.steps + _LONGER

    @property
    def tensor(self) -> str:
        """The tensor that is broken, where it is one."""
        return self._choice[2]

    # ---------------------------------------------------------------- for the subclasses' answers

    def everybody(self) -> tuple[frozenset[int], ...]:
        """All ranks alike: the alert names all of them, or none."""
        return (frozenset(range(self.world)), frozenset())

    def one(self) -> tuple[frozenset[int], ...]:
        """The suspect rank, known by what it posts of itself."""
        return (frozenset({self.suspects}),)

    def all(self) -> tuple[frozenset[int], ...]:
        """Every rank differs from every other, or two halves do: all of them are named."""
        return (frozenset(range(self.world)),)

    def odd_one(self) -> tuple[frozenset[int], ...]:
        """The suspect rank, known by its difference from the others.

        Of two ranks nobody can know which one it is: both are named. If something else shows it,
        it is the suspect one.
        """
        both = (frozenset({0, 1}),) if self.world == 2 else ()
        return (*self.one(), *both)


@dataclass
class Registry:
    """All cases by id, in the order of the sections of the catalogue."""

    cases: dict[str, type[Case]] = field(default_factory=dict)

    def add(self, case: type[Case]) -> type[Case]:
        """Decorator: takes a case; its family is the name of its file, or of its folder."""
        if case.id in self.cases:
            raise ValueError(f"there are two cases {case.id}")
        case.family = case.__module__.removeprefix(f"{__package__}.").partition(".")[0]
        self.cases[case.id] = case
        return case

    def chosen(self, ids: Collection[str], families: Collection[str]) -> list[type[Case]]:
        """Those asked for, faults first; all of them where none are named."""
        unknown = set(ids) - set(self.cases)
        if unknown:
            raise KeyError(f"no such case: {', '.join(sorted(unknown))}")
        ordered = sorted(self.cases.values(), key=lambda case: (case.id[0] != "F", case.id))
        return [
            case
            for case in ordered
            if (not ids or case.id in ids) and (not families or case.family in families)
        ]


REGISTRY = Registry()
register = REGISTRY.add
