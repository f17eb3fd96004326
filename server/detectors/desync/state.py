"""What the desync family remembers of a run, and its thresholds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.desync.averaged_in_groups import AveragedInGroups
from rankscope.server.detectors.desync.averaging_rounds import AveragingRounds, MissedRound
from rankscope.server.detectors.desync.coverage import Coverage
from rankscope.server.detectors.desync.exchange import Exchange
from rankscope.server.detectors.desync.incident import Divergence
from rankscope.server.detectors.desync.left_out import LeftOut
from rankscope.server.detectors.desync.never_met import NeverMet
from rankscope.server.detectors.desync.not_taken import NotTakenAverages
from rankscope.server.detectors.desync.optimizer_settings import STAGE as SETTINGS_STAGE
from rankscope.server.detectors.desync.optimizer_settings import Given
from rankscope.server.detectors.desync.resets import Resets
from rankscope.server.detectors.desync.resumed import Resumed
from rankscope.server.detectors.desync.single_link_incident import Beside
from rankscope.server.detectors.desync.versions import Versions
from rankscope.server.detectors.desync.writers import Writers
from rankscope.server.detectors.policy import Count, Policy, Steps, Times
from rankscope.server.detectors.push.servers import Servers
from rankscope.server.window import Comparison, Window

# Comparisons of the parameters that are remembered: a difference that they did not see is not
# known.
_REMEMBERED = 1024

# What the optimizers are given, before and after clipping: compared by norm at steps at which it is
# not fingerprinted.
GRADIENTS = ("reduced_gradient", "clipped_gradient")

# Parameters that no optimizer moves: their comparisons say nothing of the others.
FROZEN = "frozen"

# Which kind a desync is follows from the first link that broke.
KIND_OF_STAGE = {
    "start": "desync.parameters",
    "outside_optimizer": "desync.parameters",
    "frozen": "desync.parameters",
    "reduced_gradient": "desync.gradients",
    "clipped_gradient": "desync.gradients",
    "optimizer_state": "desync.optimizer",
    "hyperparameters": "desync.hyperparameters",
    "parameters": "desync.parameters",
}


@dataclass(frozen=True, slots=True)
class DesyncPolicy(Policy):
    """Thresholds of the desync family.

    Attributes:
        drift: relative distance below which ranks that differ in several tensors merely drift.
        critical: relative distance from which on it is critical.
        clear_after: steps in which the ranks agree again, after which it is over.
        returns: returns to equality at one interval that make it a periodic synchronisation.
        grace: steps without any comparison of a kind, after which it counts as missing.
        lag: age in steps that a worker's version of the parameters may always have.
        longest_lags: age that is allowed too, as a multiple of the longest lag that a worker has
            made up.
        synchronous: comparisons that found all parameters equal, after which the ranks do not
            differ by design.
    """

    drift: Times = 1e-6
    critical: Times = 1e-3
    clear_after: Steps = 8
    returns: Count = 4
    grace: Steps = 20
    lag: Steps = 8
    longest_lags: Count = 4
    synchronous: Count = 4


@dataclass(slots=True)
class Asynchronous:
    """Workers that hold versions of one model.

    Attributes:
        since: first step at which they did.
        lags: rank -> steps by which its version is old.
        caught_up: longest lag that a rank has caught up with.
    """

    since: int
    lags: dict[int, int]
    caught_up: int = 0


@dataclass(slots=True)
class DesyncState:
    """What the desync family remembers.

    Attributes:
        checked: stage -> comparisons so far.
        differed: stage -> those that found a difference.
        coverage: stage -> how many of the ranks they were of.
        last_equal: stage -> last step at which the ranks agreed.
        ranks: most ranks that were compared with each other.
        gradients_since, gradients_until: first and last of the newest consecutive steps at which
            the gradients of all of these were compared.
        parameters_equal: outcome of the last comparison of the parameters.
        returns: steps at which the parameters were equal again after they were not.
        period: steps from one synchronisation to the next, where there is one; else 0.
        periodic_since: first step of the synchronised phase.
        stood: steps that left the parameters as they were, of which `digest` is that of a rank.
        inside: gradients that an optimizer reduces in its own step, of which they are no link.
        unpaired: ranks that hold what no other of the `known_ranks` holds.
        partly: those of them that were compared in what others hold, too.
        rank_local: whether ranks train copies of their own of some tensors.
        dealt_out: whether each rank's optimizer holds a part of its own of all tensors.
        periodic_seen: step at which the period was recognised.
        between: whether the parameters were made equal between two steps, and not within one.
        due: the synchronisation that was due when there was none, and none was missed by some.
        unequal: steps at which they were seen to differ, and whether before the step, too.
        versions: which version of the parameters each rank holds.
        workers: where these are versions of one model, by design.
        averaging_rounds: when the ranks wrote their parameters together.
        settings: those that differ where the ranks' parameters differ by design.
        frozen: parameters that no optimizer moves, and that differ.
        servers: ranks that apply what workers push.
        given: the settings of each rank's optimizer, as far as they are known as numbers.
        resets: optimizers whose state was changed by something else than their steps.
        exchange: what was seen of an exchange between ranks that no wrapper keeps equal.
        left_out: tensors that are not averaged where others are.
        writers: who wrote parameters between two steps.
        not_taken: tensors of which a rank does not take the average of all.
        pushing: whether ranks push their gradients to a parameter server.
        in_groups: groups of ranks that are averaged, and never all of them.
        never_met: ranks that leave every synchronisation with other values than most.
    """

    steps: int = 0
    last_step: int = -1
    checked: dict[str, int] = field(default_factory=dict)
    differed: dict[str, int] = field(default_factory=dict)
    coverage: dict[str, Coverage] = field(default_factory=dict)
    last_equal: dict[str, int] = field(default_factory=dict)
    ranks: int = 0
    gradients_since: int = -1
    gradients_until: int = -2
    parameters_equal: bool = True
    returns: deque[int] = field(default_factory=lambda: deque(maxlen=8))
    period: int = 0
    periodic_since: int = 0
    periodic_seen: int = 0
    incident: Divergence | None = None
    inside: Divergence | None = None
    stood: int = 0
    digest: int = -1
    unpaired: tuple[int, ...] = ()
    partly: frozenset[int] = frozenset()
    dealt_out: bool = False
    rank_local: bool = False
    known_ranks: int = 0
    between: bool = False
    due: MissedRound | None = None
    unequal: deque[tuple[int, bool]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    versions: Versions = field(default_factory=Versions)
    workers: Asynchronous | None = None
    averaging_rounds: AveragingRounds = field(default_factory=AveragingRounds)
    settings: Beside = field(default_factory=lambda: Beside(SETTINGS_STAGE))
    frozen: Beside = field(default_factory=lambda: Beside(FROZEN))
    given: Given = field(default_factory=Given)
    servers: Servers = field(default_factory=Servers)
    resumed: Resumed = field(default_factory=Resumed)
    resets: Resets = field(default_factory=Resets)
    exchange: Exchange = field(default_factory=Exchange)
    left_out: LeftOut = field(default_factory=LeftOut)
    writers: Writers = field(default_factory=Writers)
    not_taken: NotTakenAverages = field(default_factory=NotTakenAverages)
    pushing: bool = False
    in_groups: AveragedInGroups = field(default_factory=AveragedInGroups)
    never_met: NeverMet = field(default_factory=NeverMet)

    def links(self, comparisons: Iterable[Comparison]) -> Iterable[Comparison]:
        """Those of a step that are links of its chain."""
        if self.inside is None:
            return comparisons
        return (c for c in comparisons if c.stage not in GRADIENTS)

    def learn_inside(self, window: Window, step: int) -> None:
        """Whether the optimizer reduces in its own step, as far as is known after this one."""
        if self.inside is not None:
            self.inside.last_step = step
            return
        held = window.digests.get("parameters")
        column = int(np.searchsorted(window.steps, step))
        if held is not None and column < len(window.steps) and held.present[:, column].any():
            digest = int(held.values[held.present[:, column], column][0])
            # Steps that change nothing (a rate of 0, rounded away) leave ranks equal, too.
            self.stood += digest == self.digest
            self.digest = digest
        known = self.incident
        if known is not None and known.reduced_inside(self.stood):
            known.inside = True
            self.inside, self.incident = known, None
