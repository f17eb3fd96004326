"""Ranks sample steps of their own choice: what the samples of some of them show, and what not."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.server.alerts.onset import since
from rankscope.server.comparison import compare
from rankscope.server.detectors.desync import Buffers, Desync, Progress
from rankscope.server.window import Comparison, TensorDifference
from tests.support.judging import judge
from tests.support.runs.replicas import apart
from tests.support.runs.traces import Trace


def of_ranks(comparison, *ranks):
    """The same sample, which these ranks alone have reported."""
    rows = np.flatnonzero(np.isin(comparison.ranks, ranks))
    labels, decided = compare.labels_of(comparison.clusters[rows])
    if not labels.any():
        return compare.agreed(comparison.step, comparison.stage, comparison.ranks[rows])
    return replace(
        comparison,
        ranks=comparison.ranks[rows],
        clusters=labels,
        distance=comparison.distance[rows],
        relative=comparison.relative[rows],
        decided=decided,
    )


class Unwrapped(Trace):
    """A run that nothing is known to keep equal: no wrapper reduces its gradients."""

    def windows(self, cuts=()):
        for window in super().windows(cuts):
            yield replace(window, config={"data_parallel": ""})


def run(comparisons, *, ranks=4, steps=60, kind=Trace, **series):
    loss = np.ones((ranks, steps))
    present = {name: ~np.isnan(values) for name, values in series.items()}
    values = {name: np.nan_to_num(held) for name, held in series.items()}
    return kind(
        "made",
        0,
        np.arange(steps),
        {"loss": loss, **values},
        present=present,
        comparisons=tuple(sorted(comparisons, key=lambda c: c.step)),
    )


def differing(step, stage, clusters, tensors=(), of=0):
    labels, decided = compare.labels_of(np.array(clusters))
    size = np.where(labels == 0, 0.0, 0.1)
    ranks = np.arange(len(clusters))
    return Comparison(step, stage, ranks, labels, size, size, decided, tuple(tensors), of)


def equal(step, stage, ranks=4):
    return compare.agreed(step, stage, np.arange(ranks))


def buffer(name, distance, relative=0.02):
    return TensorDifference(name, (8,), (1,), distance, relative, 8, "buffers")


# ------------------------------------------------------------------------------------- the chain


def test_ranks_that_agree_without_the_one_that_differed_show_nothing():
    made = apart(0, fault="step-skipped", at=40)
    samples = tuple(
        of_ranks(c, 0, 1, 3) if c.step > 40 and c.step % 3 else c for c in made.comparisons
    )
    (alert,) = judge(replace(made, comparisons=samples), [Desync()]).alerts
    assert (alert.ranks, alert.first_step, alert.state) == ((2,), 40, "open")
    assert alert.tensors


def test_who_differs_is_reported_again_once_all_have_sampled():
    made = apart(0, fault="subgroups", at=40)
    samples = tuple(of_ranks(c, 0, 1, 2) if 40 <= c.step < 48 else c for c in made.comparisons)
    early = judge(replace(made, comparisons=tuple(c for c in samples if c.step < 48)), [Desync()])
    late = judge(replace(made, comparisons=samples), [Desync()])
    (before,), (after,) = early.alerts, late.alerts
    assert before.id == after.id
    assert (before.ranks, after.ranks) == ((2,), (0, 1, 2, 3))
    assert after.evidence["groups"] == [[0, 1], [2, 3]]
    assert not after.evidence["decided"]


def test_of_two_that_sampled_first_the_parameters_show_which_one_is_wrong():
    made = apart(0, fault="skipped", at=40)
    samples = [
        of_ranks(c, 0, 2) if c.stage == "reduced_gradient" else c
        for c in made.comparisons
        if c.step >= 46 or c.stage == "reduced_gradient"
    ]
    early = judge(replace(made, comparisons=tuple(c for c in samples if c.step < 46)), [Desync()])
    late = judge(replace(made, comparisons=tuple(samples)), [Desync()])
    (before,), (after,) = early.alerts, late.alerts
    assert before.id == after.id
    assert (before.ranks, before.first_step) == ((0, 2), 40)
    assert (after.ranks, after.first_step, after.kind) == ((2,), 40, "desync.gradients")
    assert after.evidence["decided"]


@pytest.mark.parametrize("gradients_at", [1, 8])
def test_a_state_is_said_to_be_first_only_where_gradients_were_watched(gradients_at):
    """A gradient that is wrong at one step between two samples leaves a state that differs."""
    stages = ("reduced_gradient", "optimizer_state", "parameters")
    samples = [
        differing(step, stage, [0, 0, 1, 0])
        if step >= 40 and stage != "reduced_gradient"
        else equal(step, stage)
        for step in range(64)
        for stage in stages
        if step % (gradients_at if stage == "reduced_gradient" else 8) == 0
    ]
    (alert,) = judge(run(samples, steps=64), [Desync()]).alerts
    assert (alert.kind, alert.first_step, alert.ranks) == ("desync.optimizer", 40, (2,))
    assert "gradients agreed" in alert.cause
    said = "not compared at every step since step 32: one that was wrong" in alert.cause
    assert said == (gradients_at == 8)


@pytest.mark.parametrize(("count", "severity"), [(2, "critical"), (7, "info")])
def test_ranks_that_differ_in_a_few_tensors_from_the_start_do_not_go_their_own_ways(
    count, severity
):
    tensors = [TensorDifference(f"w{i}", (4, 4), (1,), 0.1, 0.1, 7) for i in range(count)]
    samples = [
        differing(step, stage, [0, 1], tensors, of=8)
        for step in range(40)
        for stage in ("reduced_gradient", "parameters")
    ]
    (alert,) = judge(run(samples, ranks=2, kind=Unwrapped), [Desync()]).alerts
    assert (alert.kind, alert.severity) == ("desync.gradients", severity)


def test_a_loss_scale_of_its_own_is_the_cause_of_another_gradient():
    samples = [equal(step, "hyperparameters") for step in range(30)]
    for step in range(30, 60):
        for stage in ("clipped_gradient", "hyperparameters", "parameters"):
            samples.append(differing(step, stage, [0, 0, 1, 0]))
    scales = np.full((4, 60), 65536.0)
    scales[2, 30:] /= 2
    (alert,) = judge(run(samples, amp_scale=scales), [Desync()]).alerts
    assert (alert.kind, alert.stage) == ("desync.hyperparameters", "hyperparameters")
    assert (alert.ranks, alert.first_step, alert.severity) == ((2,), 30, "critical")
    assert "loss scale differs" in alert.title
    assert "weighted unequally" in alert.cause
    assert alert.evidence["values"]["2"] == 32768.0


def test_a_learning_rate_of_its_own_comes_after_the_gradient_in_the_chain():
    stages = ("clipped_gradient", "hyperparameters", "parameters")
    samples = [differing(step, s, [0, 0, 1, 0]) for step in range(30, 60) for s in stages]
    rates = np.full((4, 60), 0.1)
    rates[2, 30:] /= 2
    (alert,) = judge(run(samples, lr=rates, amp_scale=np.full((4, 60), 8.0)), [Desync()]).alerts
    assert (alert.kind, alert.stage) == ("desync.gradients", "clipped_gradient")


def test_what_a_rank_loads_at_a_restart_is_dated_by_the_checkpoint():
    """Steps 32 to 36 are trained again after it, and were judged before."""
    samples = [equal(step, "parameters") for step in range(37)]
    samples += [differing(step, "parameters", [0, 0, 1, 0]) for step in range(37, 60)]
    before, after = run(samples).windows((37,))
    after = replace(
        after,
        comparisons=(differing(32, "start", [0, 0, 1, 0]), *after.comparisons),
        begins=dict.fromkeys(range(4), (0, 32)),
    )
    detector = Desync()
    state = detector.start()
    assert detector.advance(before, state).findings == ()
    (finding,) = detector.advance(after, state).findings
    assert (finding.kind, finding.stage, finding.first_step) == ("desync.parameters", "start", 32)
    assert (finding.ranks, finding.last_step, finding.severity) == ((2,), 59, "critical")
    assert finding.evidence["agreed_until"] is None


# --------------------------------------------------------------------------------------- progress


@pytest.mark.parametrize("begins", [(32, 32), (32, 16)])
def test_ranks_that_go_on_without_others_began_at_one_step(begins):
    (window,) = run([]).windows()
    window = replace(
        window,
        world_size=2,
        begins={0: (0, begins[0]), 1: (0, begins[1]), 2: (0,), 3: (0,)},
    )
    detector = Progress()
    findings = detector.advance(window, detector.start()).findings
    assert [(f.ranks, f.first_step) for f in findings] == ([((0, 1), 16)] if 16 in begins else [])


def discarding(step, rank, *, ranks=2, steps=60):
    thrown = np.full((ranks, steps), np.nan)
    thrown[rank, step] = 1.0
    return thrown


def parted(since, *, ranks=2, every=8):
    clusters = [*[0] * (ranks - 1), 1]
    for step in range(0, 60, every):
        for stage in ("reduced_gradient", "parameters"):
            yield equal(step, stage, ranks) if step < since else differing(step, stage, clusters)


def test_a_gradient_thrown_away_on_one_rank_shows_the_step_that_it_left_out():
    made = run(parted(30), ranks=2, passes_discarded=discarding(29, 1))
    for cuts in ((), range(60)):
        (alert,) = judge(made, [Progress()], cuts).alerts
        assert (alert.kind, alert.severity) == ("desync.progress", "critical")
        assert (alert.ranks, alert.first_step, alert.seen_step) == ((1,), 29, 32)
        assert "threw it away" in alert.cause


def test_what_shows_it_first_opens_the_alert_however_the_steps_are_cut():
    norms = np.tile(1.0 + 0.01 * np.arange(61), (4, 1))
    applied = norms[:, :60].copy()
    applied[1, 29:] = norms[1, 30:]  # a step ahead of what it has not taken
    samples = [
        c if c.step < 29 else differing(c.step, c.stage, [0, 1, 0, 0])
        for c in parted(30, ranks=4, every=1)
    ]
    thrown = discarding(29, 1, ranks=4)
    made = run(samples, ranks=4, grad_norm=applied, passes_discarded=thrown)
    found = {
        (a.id, a.ranks, a.first_step, a.seen_step)
        for cuts in ((), range(60), (30,), (31,))
        for a in judge(made, [Progress()], cuts).alerts
    }
    ((_, ranks, first, seen),) = found
    assert (ranks, first, seen) == ((1,), 29, 29)


def test_a_gradient_thrown_away_by_ranks_that_stay_equal_is_none_left_out():
    assert not judge(run(parted(99), passes_discarded=discarding(29, 1), ranks=2), [Progress()]).of(
        "desync.progress"
    )


def test_nor_is_one_that_all_ranks_threw_away():
    thrown = discarding(29, 1)
    thrown[0, 29] = 1.0
    assert not judge(run(parted(30), passes_discarded=thrown, ranks=2), [Progress()]).alerts


def test_more_thrown_away_than_by_the_others_shows_it_where_all_throw_some_away():
    """Of two networks that play against each other, each step gives the other one a gradient."""
    thrown = np.ones((2, 60))
    thrown[1, 29] = 3.0
    (alert,) = judge(run(parted(30), passes_discarded=thrown, ranks=2), [Progress()]).alerts
    assert (alert.ranks, alert.first_step) == ((1,), 29)
    assert "threw away 3 gradients that it had computed, the others 1," in alert.cause


def test_nor_one_of_ranks_that_differed_before():
    assert not judge(
        run(parted(20), passes_discarded=discarding(29, 1), ranks=2), [Progress()]
    ).alerts


# ---------------------------------------------------------------------------------------- buffers


def statistics(step, clusters, distance, variance=0.02):
    tensors = [buffer("bn.running_mean", distance), buffer("bn.running_var", distance, variance)]
    return differing(step, "buffers", clusters, tensors, of=3)


def severity_of(samples):
    (alert,) = judge(run(samples, ranks=len(samples[0].ranks)), [Buffers()]).alerts
    return alert.severity, alert.evidence["harm"]


def test_statistics_of_each_ranks_own_batches_are_worth_a_note():
    samples = [statistics(step, [0, 1, 2, 3], 0.1 + 0.01 * step) for step in range(40)]
    assert severity_of(samples) == ("info", "")


def test_statistics_that_most_ranks_share_are_not_of_own_batches():
    samples = [equal(20, "buffers"), statistics(30, [0, 0, 1, 0], 0.1)]
    assert severity_of(samples) == ("warning", "minority")


def test_other_buffers_may_be_one_ranks_own():
    counter = TensorDifference("seen", (1,), (2,), 1.0, 1.0, 1, "buffers")
    assert severity_of([differing(30, "buffers", [0, 0, 1, 0], [counter], of=3)]) == ("info", "")


def others(step, clusters, distance, relative):
    mean = TensorDifference("mean", (3, 1, 1), (1,), distance, relative, 1, "buffers")
    return differing(step, "buffers", clusters, [mean], of=3)


@pytest.mark.parametrize("clusters", [[0, 1], [0, 0, 1, 0], [0, 1, 2, 3]])
def test_what_no_step_moves_is_not_each_ranks_own(clusters):
    samples = [others(step, clusters, 0.4, 0.2) for step in range(0, 40, 8)]
    (alert,) = judge(run(samples, ranks=len(clusters)), [Buffers()]).alerts
    assert (alert.severity, alert.evidence["harm"]) == ("warning", "constant")
    assert "No step of the training moves `mean`" in alert.cause
    assert alert.first_step == 0


def test_a_memory_of_each_ranks_own_moves():
    samples = [others(s, [0, 1, 2, 3], 0.4 + 0.01 * s, 0.2) for s in range(0, 40, 8)]
    assert severity_of(samples) == ("info", "")


def test_nor_does_a_counter_that_lags_by_the_same_number_stand_still():
    samples = [others(s, [0, 0, 1, 0], 1.0, 1 / (1 + s)) for s in range(0, 40, 8)]
    assert severity_of(samples) == ("info", "")


def test_nor_what_differs_by_its_rounding():
    samples = [others(s, [0, 0, 1, 0], 1e-5, 1e-5) for s in range(0, 40, 8)]
    assert severity_of(samples) == ("info", "")


def test_statistics_that_differ_and_stay_as_they_are():
    samples = [equal(20, "buffers", 2), *(statistics(step, [0, 1], 0.1) for step in (30, 34))]
    assert severity_of(samples) == ("warning", "still")


def came_to_rest(at, until=60):
    return [statistics(step, [0, 1], 0.1 + 0.01 * min(step, at)) for step in range(0, until, 2)]


def test_statistics_that_moved_before_they_came_to_rest_are_dated():
    own, rest = sorted(
        judge(run(came_to_rest(30), ranks=2), [Buffers()]).alerts, key=lambda a: a.first_step
    )
    assert (own.severity, own.first_step, own.evidence["harm"]) == ("info", 0, "")
    assert (rest.severity, rest.evidence["harm"]) == ("warning", "still")
    assert since(rest) == (31, 32)
    assert rest.seen_step == 32


def test_statistics_that_move_again_no_longer_differ_by_a_constant():
    samples = [
        *came_to_rest(20, 30),
        *(statistics(step, [0, 1], 0.2 + 0.01 * step) for step in range(30, 60, 2)),
    ]
    rest = max(
        judge(run(samples, ranks=2, steps=60), [Buffers()]).alerts, key=lambda a: a.first_step
    )
    assert (rest.state, rest.first_step, rest.last_step) == ("resolved", 22, 28)


def test_statistics_of_very_different_data():
    samples = [statistics(s, [0, 1, 2, 3], 0.1 + s, variance=0.1 * s) for s in range(1, 9)]
    assert severity_of(samples) == ("warning", "far")


def own_statistics(step, ranks, jumped=None, *, since=40, size=6.0):
    """Each rank follows its own batches; `distance` is from the first rank's."""
    random = np.random.default_rng(step)
    distance = 0.05 * (1 + 0.3 * random.random(ranks))
    distance[0] = 0.0
    far = jumped is not None and step >= since
    if far:
        distance[slice(1, None) if jumped == 0 else jumped] = size * (1 + 0.01 * random.random())
    made = statistics(
        step, list(range(ranks)), float(distance.max()), variance=float(distance.max())
    )
    return replace(made, distance=distance, relative=distance)


@pytest.mark.parametrize("jumped", [0, 2])
def test_statistics_that_one_rank_has_overwritten_are_dated_and_placed(jumped):
    samples = [own_statistics(step, 4, jumped) for step in range(80)]
    found = judge(run(samples, steps=80), [Buffers()]).alerts
    own, jump = sorted(found, key=lambda alert: alert.first_step)
    assert (own.severity, own.first_step, own.evidence["harm"]) == ("info", 0, "")
    assert (jump.severity, jump.first_step, jump.ranks) == ("warning", 40, (jumped,))
    assert set(jump.tensors) == {"bn.running_mean", "bn.running_var"}
    assert "written, restored or reset" in jump.cause


def test_of_two_ranks_nothing_shows_whose_statistics_jumped():
    samples = [own_statistics(step, 2, 1) for step in range(80)]
    jump = max(
        judge(run(samples, ranks=2, steps=80), [Buffers()]).alerts, key=lambda a: a.first_step
    )
    assert (jump.first_step, jump.ranks) == (40, (0, 1))
    assert "nothing shows which one" in jump.cause


def test_statistics_that_move_within_what_batches_do_are_no_jump():
    samples = [own_statistics(step, 4, 2, size=0.3) for step in range(80)]
    assert severity_of(samples) == ("info", "")


def test_statistics_of_different_models_say_nothing_of_the_data():
    moved = [TensorDifference("w", (4, 4), (1, 2, 3), 0.3, 0.3, 9)]
    samples = [
        sample
        for s in range(1, 9)
        for sample in (
            statistics(s, [0, 1, 2, 3], 0.1 + s, variance=0.1 * s),
            differing(s, "parameters", [0, 1, 2, 3], moved, of=1),
        )
    ]
    assert severity_of(samples) == ("info", "")


def test_buffers_of_the_others_that_agree_show_nothing():
    samples = [
        of_ranks(c, 0, 1, 3) if c.step % 3 == 1 else c
        for c in (statistics(step, [0, 0, 1, 0], 0.1 + step) for step in range(30, 60))
    ]
    (alert,) = judge(run(samples), [Buffers()]).alerts
    assert (alert.first_step, alert.state) == (30, "open")


class Halves(Trace):
    """Two ranks that hold different halves of a model."""

    def windows(self, cuts=()):
        for window in super().windows(cuts):
            yield replace(window, config={"data_parallel": ""}, classes=((0,), (1,)))


def test_what_ranks_with_different_parts_both_hold_is_said_to_be_compared():
    tensors = [TensorDifference("norm", (4,), (1,), 0.1, 0.1, 4)]
    good = [equal(step, "reduced_gradient", 2) for step in range(20)]
    check = judge(run(good, ranks=2, kind=Halves), [Desync()]).checks["desync.gradients"]
    assert check.status == "ok"
    assert "Of ranks 0 and 1, only tensors that other ranks hold" in check.why
    bad = [differing(step, "reduced_gradient", [0, 1], tensors, of=4) for step in range(20, 60)]
    (alert,) = judge(run([*good, *bad], ranks=2, kind=Halves), [Desync()]).alerts
    assert (alert.severity, alert.first_step, alert.tensors) == ("critical", 20, ("norm",))


# --------------------------------------------------------------------- settings and the state


def test_a_momentum_of_its_own_comes_before_the_state_that_it_makes():
    """A setting other than the rate goes into the state of the same step."""
    stages = ("optimizer_state", "hyperparameters", "parameters")
    samples = [equal(step, stage) for step in range(30) for stage in stages]
    samples += [differing(step, s, [0, 0, 1, 0]) for step in range(30, 60) for s in stages]
    given = np.full((4, 60), np.nan)
    given[:, 0], given[2, 30] = 0.9, 0.5
    made = run(samples, lr=np.full((4, 60), 0.1), **{"hyperparameters/0/momentum": given})
    (alert,) = judge(made, [Desync()]).alerts
    assert (alert.kind, alert.stage) == ("desync.hyperparameters", "hyperparameters")
    assert (alert.ranks, alert.first_step) == ((2,), 30)
    assert alert.title == (
        "Rank 2's momentum differs from the other ranks' since step 30 (0.5 instead of 0.9)"
    )
    assert "learning rate" not in alert.cause
    assert alert.evidence["values"] == {"0": 0.9, "1": 0.9, "2": 0.5, "3": 0.9}


def test_a_state_that_was_restored_with_its_rate_is_a_matter_of_the_state():
    stages = ("optimizer_state", "hyperparameters", "parameters")
    samples = [differing(step, s, [0, 0, 1, 0]) for step in range(30, 60) for s in stages]
    rates = np.full((4, 60), 0.1)
    rates[2, 30:] = 0.2
    (alert,) = judge(run(samples, lr=rates), [Desync()]).alerts
    assert (alert.kind, alert.stage) == ("desync.optimizer", "optimizer_state")


def test_a_setting_of_a_further_group_is_named():
    """Of further groups, only what differs from the first is posted when the run begins."""
    samples = [differing(step, "hyperparameters", [0, 1, 0]) for step in range(30, 60)]
    first, second = np.full((3, 60), np.nan), np.full((3, 60), np.nan)
    first[:, 0], second[1, 30] = 0.1, 0.4
    made = run(
        samples,
        ranks=3,
        **{"hyperparameters/0/weight_decay": first, "hyperparameters/1/weight_decay": second},
    )
    (alert,) = judge(made, [Desync()]).alerts
    assert alert.title.endswith(
        "weight decay differs from the other ranks' since step 30 (0.4 instead of 0.1)"
    )


def test_of_two_ranks_with_different_betas_both_values_are_reported():
    samples = [differing(step, "hyperparameters", [0, 1]) for step in range(30, 60)]
    given = np.full((2, 60), np.nan)
    given[:, 0], given[1, 30] = 0.9, 0.8
    made = run(samples, ranks=2, **{"hyperparameters/0/betas.0": given})
    (alert,) = judge(made, [Desync()]).alerts
    assert alert.title == (
        "Ranks 0 and 1 have different values of beta1 since step 30 (0.8 and 0.9)"
    )


# ------------------------------------------------------------------------- a step too many


def norms_of_ranks(ranks, *, extra, rank):
    """Norms of gradients that a rank applies a step later than the others from `extra` on."""
    common = 1 + np.random.default_rng(3).random(61)
    norms = np.tile(common[:60], (ranks, 1))
    norms[rank, extra:] = common[extra - 1 : 59]
    return norms


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_steps_twice_with_one_gradient_has_taken_a_step_more(ranks):
    passes = np.ones((ranks, 60))
    passes[1, 30] = np.nan
    made = run(
        (), ranks=ranks, grad_norm=norms_of_ranks(ranks, extra=30, rank=1), micro_steps=passes
    )
    (alert,) = judge(made, [Progress()]).alerts
    assert (alert.kind, alert.ranks, alert.first_step) == ("desync.progress", (1,), 30)
    assert alert.title == "Rank 1 took one step more than the others, at step 30"
    assert "called twice" in alert.cause


def test_a_rank_that_applies_old_gradients_but_computes_its_own_takes_the_same_steps():
    norms = norms_of_ranks(4, extra=30, rank=1)
    made = run((), grad_norm=norms, micro_steps=np.ones((4, 60)))
    assert judge(made, [Progress()]).alerts == ()


def test_a_step_without_a_pass_after_which_all_is_as_before_is_nothing():
    norms, passes = norms_of_ranks(4, extra=60, rank=1), np.ones((4, 60))
    passes[1, 30] = np.nan
    assert judge(run((), grad_norm=norms, micro_steps=passes), [Progress()]).alerts == ()
