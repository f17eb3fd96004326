"""Ranks whose parameters differ by design: averaged now and then, or versions of one model."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.server.comparison import compare
from rankscope.server.detectors.desync.detector import Desync
from rankscope.server.window import Series, Window
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 80
CUTS = ((), range(0, STEPS, 7), range(STEPS))


@dataclass
class Digests:
    """A job of which only model digests are known: what each rank held after each step."""

    ranks: int
    after: np.ndarray = field(init=False)
    before: np.ndarray = field(init=False)
    start: int = 1
    unseen: set[int] = field(default_factory=set)
    # Whether what was written after a sampled step is reported where the next one is not sampled.
    alone: bool = False
    # Whether every step says who wrote its parameters before it.
    marked: bool = False

    def __post_init__(self):
        self.after = np.zeros((self.ranks, STEPS), np.uint64)
        self.before = np.zeros((self.ranks, STEPS), np.uint64)

    def windows(self, cuts=()):
        edges = sorted({0, *(c for c in cuts if 0 < c < STEPS), STEPS})
        everyone = np.arange(self.ranks, dtype=np.int64)
        last = np.hstack([np.full((self.ranks, 1), self.start, np.uint64), self.after[:, :-1]])
        changed = self.before - last
        for low, high in zip(edges, edges[1:], strict=False):
            found = []
            for step in range(low, high):
                for stage, digests in (("outside_optimizer", changed), ("parameters", self.after)):
                    outside = stage == "outside_optimizer"
                    if outside and (step - 1 in self.unseen or step == 0):
                        continue
                    if step in self.unseen and not (outside and self.alone):
                        continue
                    found.append(compare.compare_digests(step, stage, everyone, digests[:, step]))
            first = np.full((self.ranks, high - low), self.start, np.uint64)
            there = np.zeros(first.shape, bool)
            there[:, 0] = low == 0
            seen = np.array([step not in self.unseen for step in range(low, high)])
            after = np.tile(seen, (self.ranks, 1))
            before = [step - 1 not in self.unseen for step in range(low, high)]
            since = np.tile(before, (self.ranks, 1)) & (after | self.alone)
            wrote = (changed != 0)[:, low:high] & self.marked
            marks = {
                "parameters_written": Series(np.ones(wrote.shape), wrote),
                "loss": Series(np.ones(wrote.shape), np.ones(wrote.shape, bool)),
            }
            yield Window(
                world_size=self.ranks,
                ranks=everyone,
                steps=np.arange(low, high),
                series=marks if self.marked else {},
                comparisons=tuple(found),
                last_step=high - 1,
                config={"data_parallel": ""},
                begins=dict.fromkeys(range(self.ranks), (0,)),
                digests={
                    "start": Series(first, there),
                    "outside_optimizer": Series(changed[:, low:high], since),
                    "parameters": Series(self.after[:, low:high], after),
                },
            )


def averaged(ranks, *, every=8, absent=None, at=23):
    """Local SGD: each rank by itself, and after every N steps all take the mean."""
    job = Digests(ranks)
    random = np.random.default_rng(3)
    held = np.full(ranks, job.start, np.uint64)
    for step in range(STEPS):
        job.before[:, step] = held
        held = random.integers(1, 2**63, ranks).astype(np.uint64)
        job.after[:, step] = held
        if step % every == every - 1:
            mean = np.full(ranks, random.integers(1, 2**63), np.uint64)
            if step == at and absent is not None:
                mean[absent] = held[absent]
            held = mean
    return job


def never_met(ranks, leavers, *, every=8):
    """Local SGD of which one rank leaves every average with values of its own.

    Args:
        leavers: rank that does so at the first average, at the second, and so on, round and round.
    """
    job = averaged(ranks, every=every)
    random = np.random.default_rng(4)
    for turn, step in enumerate(range(every, STEPS, every)):
        job.before[leavers[turn % len(leavers)], step] = random.integers(1, 2**63)
    return job


def averaged_in_groups(groups, *, every=4, outer=0):
    """Local SGD whose averages go over groups of ranks.

    Args:
        groups: these, one such partition for each round, round and round.
        outer: of how many rounds one is an average of all ranks; 0 for none.
    """
    job = averaged(sum(map(len, groups[0])), every=every)
    random = np.random.default_rng(5)
    for turn, step in enumerate(range(every, STEPS, every), start=1):
        if outer and turn % outer == 0:
            continue
        for group in groups[turn % len(groups)]:
            job.before[group, step] = random.integers(1, 2**63)
    return job


def served(ranks, *, every=3, late=None, at=40, own=None):
    """A parameter server: rank 0 makes versions, each worker pulls now and then."""
    job = Digests(ranks)
    held = np.full(ranks, job.start, np.uint64)
    for step in range(STEPS):
        job.before[:, step] = held
        held[0] = 1000 + step
        for rank in range(1, ranks):
            if (step + rank) % every == 0 and not (rank == late and step >= at):
                held[rank] = held[0]
        if own is not None and step >= at:
            held[own] = 5000 + step
        job.after[:, step] = held
    return job


def serious(job, cuts):
    found = judge(job, [Desync()], cuts)
    alerts = [alert for alert in found.alerts if alert.severity != "info"]
    return alerts, found


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_are_averaged_now_and_then_are_well(ranks, cuts):
    alerts, found = serious(averaged(ranks), cuts)
    assert alerts == []
    assert found.checks["desync.parameters"].why.endswith(
        "every 8 steps, when they are synchronised."
    )


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
def test_the_one_that_misses_an_average_is_named(cuts):
    [alert], _ = serious(averaged(4, absent=2), cuts)
    assert (alert.kind, alert.ranks, alert.first_step) == ("desync.parameters", (2,), 24)
    assert "fell to 0 on ranks 0, 1 and 3, and not on rank 2" in alert.cause
    assert alert.state == "resolved"


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
@pytest.mark.parametrize("groups", [([0, 1], [2, 3]), ([0, 2, 4], [1, 3])])
def test_ranks_that_are_averaged_in_groups_only_are_named_with_these(groups, cuts):
    [alert], _ = serious(averaged_in_groups([groups]), cuts)
    assert (alert.kind, alert.severity, alert.state) == ("desync.parameters", "critical", "open")
    assert (alert.first_step, alert.ranks) == (4, tuple(range(sum(map(len, groups)))))
    assert alert.evidence["groups"] == [list(group) for group in groups]
    # The seventeenth round is the one before step 68.
    assert alert.seen_step == 68
    assert "At 19 rounds that were seen" in alert.cause


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
@pytest.mark.parametrize("sampled_every", [2, 4])
def test_it_stands_where_later_rounds_are_not_sampled(sampled_every, cuts):
    job = averaged_in_groups([([0, 1], [2, 3])], every=2)
    job.alone = True
    job.unseen = {step for step in range(48, STEPS) if step % sampled_every}
    [alert], _ = serious(job, cuts)
    assert (alert.severity, alert.state, alert.first_step) == ("critical", "open", 2)


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
def test_samples_of_every_other_step_show_it(cuts):
    job = averaged_in_groups([([0, 1], [2, 3])], every=2)
    job.alone = True
    job.unseen = {step for step in range(8, STEPS) if step % 2 == 0}
    [alert], _ = serious(job, cuts)
    assert "only inside (0 and 1) and (2 and 3)" in alert.title


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
@pytest.mark.parametrize(
    ("every", "outer", "stride"), [(2, 8, 1), (2, 16, 1), (1, 2, 2), (1, 4, 2)]
)
def test_averages_in_two_stages_are_well(every, outer, stride, cuts):
    job = averaged_in_groups([([0, 1], [2, 3])], every=every, outer=outer)
    job.alone = True
    # Averages of all may fall between two samples every time.
    job.unseen = {step for step in range(16, STEPS) if step % stride}
    alerts, _ = serious(job, cuts)
    assert [alert for alert in alerts if "only inside" in alert.title] == []


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
def test_ranks_that_meet_others_in_each_round_are_well(cuts):
    turns = [([0, 1], [2, 3]), ([0, 2], [1, 3]), ([0, 3], [1, 2])]
    alerts, _ = serious(averaged_in_groups(turns), cuts)
    assert [alert for alert in alerts if "only inside" in alert.title] == []


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
def test_of_two_ranks_nobody_can_say_which_one_missed_it(cuts):
    [alert], _ = serious(averaged(2, absent=1), cuts)
    assert (alert.ranks, alert.first_step) == ((0, 1), 24)
    assert "nothing shows which one is wrong" in alert.cause


def test_the_first_average_of_all_is_none_that_can_be_missed():
    job = averaged(4, absent=2, at=7)
    alerts, _ = serious(job, ())
    assert alerts == []


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_workers_may_hold_old_versions(ranks, cuts):
    alerts, found = serious(served(ranks), cuts)
    assert alerts == []
    assert "versions of one model" in found.checks["desync.parameters"].why


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
def test_a_worker_whose_version_grows_older_and_older_is_named(cuts):
    [alert], _ = serious(served(4, late=2), cuts)
    # It has pulled for the last time at step 37, and 12 is 4 times what was caught up with.
    assert (alert.ranks, alert.first_step, alert.seen_step) == ((2,), 38, 46)
    assert "parameters of rank 2 are 42 steps old" in alert.cause


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
def test_a_worker_that_makes_versions_of_its_own_is_no_worker(cuts):
    alerts, _ = serious(served(4, own=3), cuts)
    assert [alert.first_step for alert in alerts] == [40]


def test_where_the_averaging_is_not_seen_nobody_is_said_to_have_missed_it():
    job = averaged(4)
    # From step 60 on every fourth step is sampled alone: nothing shows what was before it.
    job.unseen = {step for step in range(60, STEPS) if step % 4}
    alerts, _ = serious(job, ())
    assert alerts == []


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
@pytest.mark.parametrize("every", [1, 2, 4])
def test_an_average_between_two_samples_is_none_that_was_missed(every, cuts):
    job = averaged(2, every=every)
    job.unseen = set(range(9, 15))
    alerts, found = serious(job, cuts)
    assert alerts == []
    assert "are made equal every" in found.checks["desync.parameters"].why


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
def test_more_averages_than_were_sampled_at_first_are_no_desync(cuts):
    job = averaged(2, every=4)
    # The steps around every other average are sampled, and then all of them.
    job.unseen = {step for step in range(1, 60) if step % 8 not in (7, 0)}
    alerts, found = serious(job, cuts)
    assert alerts == []
    assert found.checks["desync.parameters"].why.endswith(
        "every 4 steps, when they are synchronised."
    )


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
def test_what_was_written_after_a_sampled_step_is_known_without_a_sample_of_the_next(cuts):
    job = averaged(2, every=4)
    job.alone = True
    # The last step before each average, and none after it.
    job.unseen = {step for step in range(STEPS) if step % 4 != 3}
    alerts, found = serious(job, cuts)
    assert alerts == []
    assert found.checks["desync.parameters"].why.endswith(
        "every 4 steps, when they are synchronised."
    )


def ends(ranks, *, at=8, every=2, later=()):
    """Local SGD whose averages end, but for later ones before these steps."""
    job = averaged(ranks, every=every)
    job.marked = job.alone = True
    random = np.random.default_rng(4)
    for step in range(at, STEPS):
        job.before[:, step] = random.integers(1, 2**63) if step in later else job.after[:, step - 1]
        job.after[:, step] = random.integers(1, 2**63, ranks)
    return job


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sampled_every", [1, 3])
def test_averages_that_end_for_all_are_no_average_that_one_missed(ranks, sampled_every, cuts):
    job = ends(ranks)
    job.unseen = {step for step in range(12, STEPS) if step % sampled_every}
    [alert], _ = serious(job, cuts)
    assert (alert.kind, alert.severity, alert.state) == ("desync.parameters", "warning", "open")
    assert (alert.ranks, alert.first_step) == (tuple(range(ranks)), 8)
    assert alert.seen_step >= 72
    assert "and no longer since" in alert.cause
    assert "missed" not in alert.cause


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
@pytest.mark.parametrize("sampled_every", [1, 3])
@pytest.mark.parametrize("later", [range(16, STEPS, 8), (20, 40, 60), (60,)])
def test_averages_that_come_more_seldom_have_not_ended(later, sampled_every, cuts):
    job = ends(4, later=later)
    job.unseen = {step for step in range(12, STEPS) if step % sampled_every}
    assert serious(job, cuts)[0] == []


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
def test_averages_that_are_no_longer_needed_have_not_ended(cuts):
    job = ends(4)
    # All ranks take the same steps from then on, and one leaves them at the end.
    for step in range(8, STEPS):
        job.before[:, step] = job.after[:, step - 1] if step > 8 else 77
        job.after[:, step] = 1000 + step
    job.after[3, 76:] = np.arange(76, STEPS) + 5000
    job.before[3, 77:] = job.after[3, 76:-1]
    [alert], _ = serious(job, cuts)
    assert (alert.ranks, alert.first_step) == ((3,), 76)


def test_a_zero_of_another_sign_is_no_desync():
    zeros = np.zeros((1, 4))
    fingerprints = [
        wire.Fingerprint(
            step=0,
            stage="start",
            table="parameters",
            digests=np.array([1 + (rank == 2), 7], np.uint64),
            sketches=np.vstack([zeros, zeros + 1]),
        )
        for rank in range(4)
    ]
    everyone = np.arange(4, dtype=np.int64)
    table = compare.LabelledTable(("bias", "weight"), ((3,), (4,)), ("parameters",) * 2)
    made = compare.compare_fingerprints(0, "start", everyone, fingerprints, table)
    window = Window(
        world_size=4,
        ranks=everyone,
        steps=np.arange(1),
        series={},
        comparisons=(made,),
        last_step=0,
        begins=dict.fromkeys(range(4), (0,)),
    )
    detector = Desync()
    [finding] = detector.advance(window, detector.start()).findings
    assert (finding.severity, finding.ranks, finding.tensors) == ("info", (2,), ("bias",))


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
@pytest.mark.parametrize("ranks", [3, 4])
def test_a_rank_that_never_met_the_others_is_named(ranks, cuts):
    [alert], _ = serious(never_met(ranks, [1]), cuts)
    assert (alert.kind, alert.ranks, alert.first_step) == ("desync.parameters", (1,), 8)
    assert "not on rank 1" in alert.cause
    assert alert.state == "open"


@pytest.mark.parametrize("cuts", CUTS, ids=("whole", "blocks", "steps"))
def test_groups_that_meet_in_turns_leave_nobody_out(cuts):
    alerts, _ = serious(never_met(4, [0, 1, 2, 3]), cuts)
    assert not any("missed the synchronisation" in alert.cause for alert in alerts)


def test_workers_that_post_no_parameters_have_none_to_compare():
    posted = np.ones((3, STEPS))
    trace = Trace("pushes", 0, np.arange(STEPS), {"loss": posted, "pushes": posted})
    check = judge(trace, [Desync()], ()).checks["desync.parameters"]
    assert (check.status, "there is one copy" in check.why) == ("not_applicable", True)
