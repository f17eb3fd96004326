"""Ranks that must hold the same and do not: which link of the chain broke first."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import ClassVar

from rankscope.server.comparison.steps import PUSHED
from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.desync.averaging_rounds import MARK, AveragingRound, MissedRound
from rankscope.server.detectors.desync.checks import SUBJECTS, checks_of
from rankscope.server.detectors.desync.coverage import Coverage
from rankscope.server.detectors.desync.explain import finding_of
from rankscope.server.detectors.desync.frozen import standing, take_frozen
from rankscope.server.detectors.desync.incident import Divergence
from rankscope.server.detectors.desync.opening import open_divergence
from rankscope.server.detectors.desync.optimizer_settings import SERIES as GIVEN
from rankscope.server.detectors.desync.optimizer_settings import STAGE as SETTINGS_STAGE
from rankscope.server.detectors.desync.order import (
    SETTINGS,
    place_of,
    state_was_first,
)
from rankscope.server.detectors.desync.parts import (
    hold_parts,
    optimizer_dealt_out,
    read_apart,
)
from rankscope.server.detectors.desync.resumed import resumed_finding
from rankscope.server.detectors.desync.returns import (
    interval_of_returns,
    missed_at,
    returns_finding,
    still_periodic,
    workers_finding,
)
from rankscope.server.detectors.desync.state import (
    FROZEN,
    GRADIENTS,
    KIND_OF_STAGE,
    Asynchronous,
    DesyncPolicy,
    DesyncState,
)
from rankscope.server.detectors.desync.versions import VersionFacts
from rankscope.server.detectors.policy import Policy
from rankscope.server.window import Comparison, Window


class Desync(Detector[DesyncState]):
    """Ranks that must hold the same do not: the first broken link of the chain names the cause.

    Within a step the links follow each other: parameters at the start, parameters changed outside
    the optimizer, loss scale, reduced gradient, clipped gradient, optimizer state, hyperparameters,
    parameters after the update. What differs first is the cause and gives the kind; what differs
    after it is its consequence and no alert of its own. An incident lasts until the parameters
    agree again.

    Statistic:
        Equality of digests (bit by bit), and of gradient norms to 1e-6. The suspect ranks are those
        outside the largest group of equal ranks, as soon as all have sampled; with two ranks, or
        two groups of one size, all are named and nothing indicates which one is wrong. That ranks
        agree again counts where those that had diverged are among them. The tensors come from the
        first sample of single tensors after the onset, ordered by relative distance. Where the
        parameters return to equality four times at one interval, or twice where all ranks write
        them at one interval, they are taken to be synchronised every N steps on purpose,
        and only a missed synchronisation that was sampled is a desync. Where ranks that were all by
        themselves have come together before, one that is left out when most of them do again has
        missed it. Where ranks hold versions of one model of which one rank makes the new ones (a
        parameter server) and were never all equal for four steps, it is the age of their versions
        that is judged: older than 8 steps, and than 4 times the oldest that was caught up with, is
        a desync. Over after 8 steps of agreement. Tensors are left out of the averaging (key
        `left out`) whose distance between the ranks shrinks in none of 4 samples at which each rank
        had written its parameters and that of the same others shrank by a quarter or more. Where
        ranks hold half of the tensors alike after an average, those that do not hold what most hold
        of another one did not take it (key `not taken`). Gradients are not compared where each
        rank's optimizer holds a part of its own of all tensors (ZeRO 1 by hand). Ranks whose
        optimizer had taken no step at attach, where that of others with the same parameters, bit
        for bit, had, resumed without its state (key `begin`).

    Severity:
        By the distance over the norm, from sketches: below 1e-6 in several tensors info (drift
        through different arithmetic), below 1e-3 warning, above critical, and warning while the
        size is not known; so are tensors that are left out where others are averaged. Gradients,
        hyperparameters and parameters at the start are critical whatever the size, drift aside:
        what differs there grows. Info for the first 64 steps where every rank was alone from the
        beginning, in half of the tensors at least, and no DDP is there to keep them equal: local
        SGD and parameter servers begin like this. For 128 steps where they stay near each other;
        later, where nothing of an exchange was seen (no gradient that two ranks share, no
        parameters written outside the optimizer), they train alone; never said of ranks that hold
        different parts of the model, which are asked for their batches.

    Evidence:
        `groups` (ranks that agree with each other), `decided`, `last_equal_step` and `agreed_until`
        (last sample before at which this link, or it or the parameters, agreed), `agreed` (links
        that were compared at the first step and agreed), `relative`, `tensor_step`,
        `tensors_differing`, `tensor_count`, `tensor_details`, `one_element`, `growth` (constant,
        shrinking, growing, exponential), `sizes` (step, distance, relative distance), `broken` and
        `compared` (steps for each link), `values` (of a hyperparameter, for each rank).

    Source:
        BLOOM-176B's silent divergence and the silent errors collected by TrainCheck (OSDI 2025);
        69 faults read in issue trackers, of which a comparison of weights alone names 24.
    """

    kinds: ClassVar[tuple[str, ...]] = tuple(SUBJECTS)
    lasting: ClassVar[str] = (
        "what differs stays different until something makes it equal: the next comparison finds it"
    )
    wants: ClassVar[tuple[str, ...]] = (*SETTINGS, GIVEN, "loss", MARK, PUSHED)
    min_ranks: ClassVar[int] = 2
    reports_open: ClassVar[bool] = True

    policies: ClassVar[type[Policy]] = DesyncPolicy
    policy: DesyncPolicy

    def start(self) -> DesyncState:
        """Nothing compared yet."""
        return DesyncState()

    def advance(self, window: Window, state: DesyncState) -> Outcome:
        """Goes through the comparisons step by step, along the chain."""
        findings = state.not_taken.take(window)
        state.resets.take(window)
        state.resumed.take(window)
        state.pushing |= PUSHED in window.series
        state.steps += len(window.steps)
        state.unpaired = tuple(sorted(c[0] for c in window.classes if len(c) == 1))
        state.known_ranks = len(window.ranks)
        members = max(window.replicas, key=len)
        state.rank_local = not window.rank_local.isdisjoint(members)
        state.dealt_out = optimizer_dealt_out(window, members)
        met = deque(state.averaging_rounds.found(window, members))
        state.exchange.observe(window, rank_local=state.rank_local)
        relevant = [c for c in window.comparisons if c.stage in KIND_OF_STAGE and len(c.ranks) > 1]
        for ended in take_frozen(state, relevant, lambda c: self._open(window, state, [c], [c])):
            findings += self._findings_of(ended)
        left = {FROZEN, *(GRADIENTS if state.dealt_out else ())}
        relevant = [c for c in relevant if c.stage not in left]
        for step, group in groupby(relevant, key=lambda c: c.step):
            if step <= state.last_step:
                # Begun anew from a checkpoint: what agreed since then is no longer what they hold.
                state.last_equal = {s: at for s, at in state.last_equal.items() if at < step}
            comparisons = every = sorted(state.links(group), key=lambda c: place_of(window, c))
            if (known := state.incident) is not None:
                comparisons = [c for c in comparisons if not c.equal or known.covers(c)]
            broken = [c for c in comparisons if not c.equal]
            _gradients_seen(state, step, every)
            state.exchange.take(every)
            for comparison in comparisons:
                stage = comparison.stage
                state.checked[stage] = state.checked.get(stage, 0) + 1
                state.coverage.setdefault(stage, Coverage()).take(comparison)
                state.ranks = max(state.ranks, len(comparison.ranks))
                if state.unpaired:
                    state.partly |= frozenset(state.unpaired).intersection(
                        comparison.ranks.tolist()
                    )
            for comparison in broken:
                stage = comparison.stage
                state.differed[stage] = state.differed.get(stage, 0) + 1
            findings += self._meet(state, met, step)
            version_facts = state.versions.take(window, step, members)
            state.never_met.take(step, version_facts)
            state.in_groups.take(step, version_facts)
            if state.workers is None and not state.never_met.rounds:
                state.left_out.take(every)
            if broken or state.incident is not None or state.period or state.workers is not None:
                self._step(window, state, step, comparisons, broken, findings, version_facts)
            if state.incident is not None:
                # Step by step: who is known to be wrong decides what is taken from then on.
                state.incident.take_reductions([r for r in window.reductions if r.step <= step])
            self._update_divergence(window, state, step, every, findings)
            state.writers.take(window, step)
            state.learn_inside(window, step)
            broken_stages = {comparison.stage for comparison in broken}
            for comparison in comparisons:
                if comparison.stage not in broken_stages:
                    state.last_equal[comparison.stage] = step
        state.given.take(window)
        state.servers.take(window)
        state.last_step = max(state.last_step, window.last_step)
        incident = state.incident
        left_out = state.left_out.finding()
        findings += [left_out] if left_out is not None else []
        in_groups, stands = state.in_groups.findings(window.last_step)
        findings += in_groups
        if incident is not None:
            incident.learn(window)
            incident.in_part = stands or left_out is not None
            if not incident.agreeing:
                incident.stands(window.last_step, window.liveness)
            met_before = bool(state.returns or state.period) or state.workers is not None
            alone = state.exchange.none_seen(incident, state.last_equal.get("parameters"))
            incident.parts |= hold_parts(window, incident)
            incident.own_batches |= incident.parts and read_apart(window, incident)
            incident.alone = alone and not met_before and not incident.parts
            findings += self._findings_of(incident)
        elif state.period:
            findings.append(returns_finding(state, state.last_step))
        if state.workers is not None:
            findings.append(workers_finding(state, state.last_step))
        if (differing := state.settings.incident) is not None:
            if not differing.agreeing:
                differing.stands(window.last_step, window.liveness)
            findings += self._findings_of(differing)
        findings += self._meet(state, met, window.last_step)
        for standing_too in (standing(state, window), state.inside):
            findings += self._findings_of(standing_too) if standing_too is not None else []
        if (without := state.resumed.found) is not None:
            findings.append(resumed_finding(without, state.last_step))
        return Outcome(checks_of(state, self.policy), tuple(findings))

    # ------------------------------------------------------------------------------ one step

    def _meet(self, state: DesyncState, met: deque[AveragingRound], until: int) -> list[Finding]:
        """Takes what the ranks said of writing their parameters, up to a step."""
        missed = []
        while met and met[0].step <= until:
            averaging = met.popleft()
            alone = state.incident is not None and state.incident.tentative
            missed.append(state.averaging_rounds.take(averaging, alone=alone))
            if state.incident is not None and not averaging.absent:
                state.incident.averaged_at(averaging.step)
        return [finding for finding in missed if finding is not None]

    def _step(
        self,
        window: Window,
        state: DesyncState,
        step: int,
        comparisons: Sequence[Comparison],
        broken: Sequence[Comparison],
        findings: list[Finding],
        version_facts: VersionFacts,
    ) -> None:
        parameters = next((c for c in comparisons if c.stage == "parameters"), None)
        if version_facts.joined:
            # The synchronisation itself, by which each changed in its own way.
            broken = [c for c in broken if c.stage != "outside_optimizer"]
        together = version_facts.joined or (parameters is not None and parameters.equal)
        incident = state.incident
        if incident is not None and (
            (incident.missed and together) or (incident.agreeing and incident.over(step))
        ):
            if not incident.agreeing:
                incident.last_step = max(incident.seen_step, step - 1)
            self._close(state, findings)
        seen = parameters is not None or version_facts.between
        if seen and not together:
            state.unequal.append((step, version_facts.between))
            if incident is not None and version_facts.between and state.averaging_rounds.at == step:
                incident.unmet = True
        if state.period and not still_periodic(state, step, parameters, version_facts):
            findings.append(returns_finding(state, step - 1))
            period, state.period = state.period, 0
            state.returns.clear()
            if parameters is not None and not together and not version_facts.nobody:
                due = MissedRound(step, period)
                self._miss(window, state, parameters, comparisons, version_facts, due)
                state.parameters_equal = False
                return
            state.due = None if together else MissedRound(step, period, ended=True)
        if seen:
            if together and not state.parameters_equal:
                state.returns.append(step)
                state.between = version_facts.joined and (
                    parameters is None or not parameters.equal
                )
                self._recognise(window, state, step, comparisons, findings)
            # Made equal between two steps, they diverge with the next.
            state.parameters_equal = parameters is not None and parameters.equal
        if state.period or self._are_workers(state, step, broken, version_facts, findings):
            return
        incident = state.incident
        missed = missed_at(state, version_facts, step)
        if missed and parameters is not None and (incident is None or incident.tentative):
            self._close(state, findings, last_step=step - 1)
            self._miss(window, state, parameters, comparisons, version_facts, missed)
            return
        if incident is None:
            if broken:
                opened = state.incident = self._open(window, state, broken, comparisons)
                opened.take([c for c in comparisons if not c.equal or opened.covers(c)])
                for comparison in broken[1:]:
                    opened.widen(comparison)
            return
        self._continue(window, state, incident, step, broken, comparisons)

    def _update_divergence(
        self,
        window: Window,
        state: DesyncState,
        step: int,
        comparisons: Sequence[Comparison],
        findings: list[Finding],
    ) -> None:
        """Settings that differ where all else may."""
        if state.settings.incident is None and all(c.equal for c in comparisons):
            return
        incident = state.incident
        tentative = incident is not None and incident.tentative
        meant = bool(state.period) or state.workers is not None or tentative
        ended = state.settings.take(
            step,
            comparisons,
            lambda broken: self._open(window, state, broken, comparisons),
            # What broke first in a step is the incident itself.
            begins=meant and (incident is None or incident.kind != KIND_OF_STAGE[SETTINGS_STAGE]),
        )
        if ended is not None:
            findings += self._findings_of(ended)

    def _close(
        self, state: DesyncState, findings: list[Finding], last_step: int | None = None
    ) -> None:
        incident, state.incident = state.incident, None
        if incident is None:
            return
        if last_step is not None:
            incident.last_step = max(incident.last_step, last_step)
        findings += self._findings_of(incident)

    def _open(
        self,
        window: Window,
        state: DesyncState,
        broken: Sequence[Comparison],
        comparisons: Sequence[Comparison],
    ) -> Divergence:
        after = self.policy.clear_after
        return open_divergence(window, state, broken, comparisons, clear_after=after)

    def _findings_of(self, incident: Divergence) -> list[Finding]:
        state_divergence, policy = incident.state_divergence, self.policy
        if state_divergence is not None:
            state_divergence.last_step = incident.last_step
        every = (incident,) if state_divergence is None else (state_divergence, incident)
        return [finding_of(one, policy.drift, policy.critical) for one in every]

    def _miss(
        self,
        window: Window,
        state: DesyncState,
        parameters: Comparison,
        comparisons: Sequence[Comparison],
        version_facts: VersionFacts,
        missed: MissedRound,
    ) -> None:
        """A synchronisation that did not make all ranks equal."""
        incident = self._open(window, state, [parameters], comparisons)
        incident.misses(missed, state.averaging_rounds.wrote)
        if version_facts.outside:
            rest = tuple(int(r) for r in parameters.ranks if int(r) not in version_facts.outside)
            incident.ranks, incident.decided = version_facts.outside, True
            incident.groups = (rest, *((rank,) for rank in version_facts.outside))
        incident.take(comparisons)
        state.incident = incident

    def _continue(
        self,
        window: Window,
        state: DesyncState,
        incident: Divergence,
        step: int,
        broken: Sequence[Comparison],
        comparisons: Sequence[Comparison],
    ) -> None:
        witness = "parameters" if state.checked.get("parameters") else incident.stage
        agrees = any(c.stage == witness and c.equal for c in comparisons)
        if broken:
            incident.agreeing = False
            incident.last_step = step
        elif agrees:
            if not incident.agreeing:
                # Nothing showed before this step that they agreed again.
                incident.last_step = max(incident.last_step, step - 1)
            incident.agreeing = True
        elif not incident.agreeing:
            incident.stands(step, window.liveness)
        for comparison in broken:
            incident.widen(comparison)
        incident.take(comparisons)
        if incident.state_divergence is not None:
            incident.state_divergence.take(comparisons)
        elif state_was_first(window.config, incident, broken):
            links = [c for c in broken if c.stage == "optimizer_state"]
            state_divergence = incident.state_divergence = self._open(
                window, state, links, comparisons
            )
            state_divergence.first_step, state_divergence.shown_by = (
                incident.first_step,
                incident.first_step,
            )
            state_divergence.take(links)

    # ------------------------------------------------------------- equality at regular intervals

    def _recognise(
        self,
        window: Window,
        state: DesyncState,
        step: int,
        comparisons: Sequence[Comparison],
        findings: list[Finding],
    ) -> None:
        """Takes regular returns to equality for synchronisation on purpose."""
        incident, returns = state.incident, list(state.returns)
        if state.period or incident is None:
            return
        state.period = period = interval_of_returns(state, self.policy.returns)
        if not period:
            return
        state.periodic_since, state.periodic_seen = incident.first_step, step
        self._close(state, findings, last_step=step - 1)
        # One that was left out before it was known that there would be one: where that was seen. A
        # round between two returns that nobody examined is none that was missed.
        seen = {at for at, before in state.unequal if before or not state.between}
        everyone = next((c for c in comparisons if len(c.ranks) == 2), None)
        for last, following in pairwise(returns[1:] if everyone is not None else ()):
            due = range(last + period, following, period)
            if (at := next((s for s in due if s in seen), None)) is None:
                continue
            assert everyone is not None
            missed = self._open(window, state, [everyone], comparisons)
            missed.kind, missed.stage = KIND_OF_STAGE["parameters"], "parameters"
            missed.misses(MissedRound(at, period), ())
            missed.last_step = step
            missed.ranks = tuple(int(r) for r in everyone.ranks)
            findings.append(finding_of(missed, self.policy.drift, self.policy.critical))

    # ---------------------------------------------------------------- versions of one model

    def _are_workers(
        self,
        state: DesyncState,
        step: int,
        broken: Sequence[Comparison],
        version_facts: VersionFacts,
        findings: list[Finding],
    ) -> bool:
        """Whether what differs are versions of one model, none of them too old."""
        workers = state.workers
        if workers is None:
            equal = state.checked.get("parameters", 0) - state.differed.get("parameters", 0)
            if (
                not broken
                or state.incident is not None
                or broken[0].stage != "parameters"
                or version_facts.lags is None
                or equal >= self.policy.synchronous
            ):
                return False
            workers = state.workers = Asynchronous(step, version_facts.lags)
        if version_facts.lags is None:
            if not version_facts.known:
                return True  # of which step it is cannot be known
            findings.append(workers_finding(state, step - 1))
            state.workers = None
            return False
        for rank, lag in workers.lags.items():
            if version_facts.lags.get(rank, lag) < lag:
                workers.caught_up = max(workers.caught_up, lag)
        workers.lags = version_facts.lags
        allowed = max(self.policy.lag, self.policy.longest_lags * workers.caught_up)
        late = tuple(sorted(rank for rank, lag in version_facts.lags.items() if lag > allowed))
        if not late:
            if state.incident is not None:
                self._close(state, findings, last_step=step - 1)
            return True
        oldest = max(version_facts.lags[rank] for rank in late)
        incident = state.incident
        if incident is None:
            incident = state.incident = Divergence(
                first_step=step - oldest + 1,
                seen_step=step,
                last_step=step,
                clear_after=self.policy.clear_after,
                kind="desync.parameters",
                stage="parameters",
                ranks=late,
                decided=True,
                groups=(tuple(sorted(set(version_facts.lags) - set(late))), late),
                agreed=(),
                by_norm=(),
                last_equal=step - oldest,
            )
        incident.last_step, incident.lag = step, (oldest, workers.caught_up)
        return True


def _gradients_seen(state: DesyncState, step: int, comparisons: Sequence[Comparison]) -> None:
    """Notes since when the gradients of all ranks were compared at every step."""
    if any(c.stage in GRADIENTS and len(c.ranks) >= state.ranks for c in comparisons):
        if step != state.gradients_until + 1:
            state.gradients_since = step
        state.gradients_until = step
