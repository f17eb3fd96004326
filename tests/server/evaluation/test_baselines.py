"""A run is held against its project's baselines while it goes on, on each database."""

import threading

import numpy as np
import pytest
from sqlalchemy import select, update

from rankscope.agent import wire
from rankscope.server.evaluation import baselines as learning
from rankscope.server.evaluation.worker import Worker
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.ingest.batches import store_batch
from rankscope.server.storage.judgement import baselines as stored
from rankscope.server.storage.judgement.alerts import findings
from rankscope.server.storage.maintenance.compaction import compact
from rankscope.server.window.baselines import widths

STEPS, RANKS = 600, 2
# Steps from one evaluation to the next.
EVERY = 40
CONFIG = {
    "parameters": 1000,
    "model": "Net",
    "optimizer": "SGD",
    "parameter_groups": [{"lr": 0.1, "momentum": 0.9}],
    "device": "cpu",
    "git_commit": "aaaa",
}


class Project:
    """Jobs that post, and a server that evaluates them, on one clock."""

    def __init__(self, engine):
        self.engine = engine
        self.time = 1000.0
        self.worker = Worker(engine, threading.Event(), now=lambda: self.time, strict=True)

    def restart(self):
        self.worker.stop()
        self.worker = Worker(self.engine, threading.Event(), now=lambda: self.time, strict=True)

    def sweep(self):
        while self.worker.sweep():
            pass

    def post(self, run, begin, end, values, *, config, state="running"):
        steps = np.arange(begin, end)
        # What was evaluated is posted where it was.
        at = {n: steps[steps % EVERY == EVERY - 1] if n == "eval/loss" else steps for n in values}
        for rank in range(RANKS):
            sent = wire.Batch(
                run=run,
                rank=rank,
                seq=begin,
                session=f"s{rank}",
                project="vision",
                world_size=RANKS,
                hello=wire.Hello(started_at=self.time, config=config) if begin == 0 else None,
                through_step=end - 1,
                state=state,
                columns={
                    name: wire.Column(at[name], series[rank, at[name]])
                    for name, series in values.items()
                },
            )
            with writing(self.engine) as connection:
                store_batch(connection, sent, received_at=self.time)
        self.time += 1.0

    def train(
        self,
        run,
        seed,
        *,
        worse=0.0,
        held_out=None,
        slower=1.0,
        config=CONFIG,
        steps=STEPS,
        part=50,
        marked=True,
    ):
        """A whole run; after each part of it, the kinds of alerts that are open, at which step."""
        drawn = np.random.default_rng(seed)
        level = (0.5 + 2 * np.exp(-np.arange(steps) / 60)) * np.exp(0.005 * drawn.standard_normal())
        noise = np.exp(0.05 * drawn.standard_normal((RANKS, steps)))
        seconds = slower * 0.1 * (1 + 0.02 * drawn.random((RANKS, steps)))
        values = {"loss": (1 + worse) * level * noise, "step_seconds": seconds}
        values["eval/loss"] = np.tile(
            (1 + (worse if held_out is None else held_out)) * level, (2, 1)
        )
        seen = {}
        for begin in range(0, steps, part):
            end = min(begin + part, steps)
            state = "finished" if end == steps else "running"
            self.post(run, begin, end, values, config=config, state=state)
            self.sweep()
            for alert in self.found(run).alerts:
                seen.setdefault(alert.kind, end)
        if marked:
            self.mark(run)
        return seen

    def mark(self, run):
        with writing(self.engine) as connection:
            stored.say(connection, run=self.key(run), baseline="marked")

    def key(self, run):
        with reading(self.engine) as connection:
            return connection.scalar(select(schema.run.c.key).where(schema.run.c.id == run))

    def found(self, run):
        key = self.key(run)
        with reading(self.engine) as connection:
            return findings(connection, runs={key: run}, now=self.time)[key]


@pytest.fixture
def project(engine):
    made = Project(engine)
    yield made
    made.worker.stop()


@pytest.fixture
def five(project):
    """Five runs of other seeds have passed, one after the other."""
    for seed in range(5):
        project.train(f"main-{seed}", seed, part=STEPS)
    return project


def kinds(seen):
    return {kind for kind in seen if kind.startswith("baseline.")}


def test_a_run_is_held_against_earlier_ones_while_it_goes_on(five):
    assert kinds(five.train("good", 50, marked=False)) == set()
    checks = five.found("good").checks
    assert checks["baseline.loss"].status == "ok"
    assert "5 baselines (main-4, main-3, main-2 and 2 more)" in checks["baseline.loss"].why
    assert checks["baseline.metric"].status == "ok"
    seen = five.train("worse", 51, worse=0.3, config={**CONFIG, "git_commit": "bbbb"})
    assert kinds(seen) == {"baseline.loss"}
    assert seen["baseline.loss"] <= STEPS / 3
    (alert,) = five.found("worse").alerts
    assert (alert.severity, alert.state) == ("warning", "open")
    assert 0.25 < alert.evidence["share"] < 0.35
    assert set(alert.evidence["baselines"]) == {f"main-{n}" for n in range(5)}
    assert "git_commit bbbb (there aaaa)" in alert.cause
    assert five.found("worse").checks["baseline.loss"].status == "open"


def test_evaluations_that_are_worse_are_found(five):
    seen = five.train("memorises", 54, held_out=0.2, marked=False)
    assert kinds(seen) == {"baseline.loss"}
    (alert,) = (a for a in five.found("memorises").alerts if a.kind == "baseline.loss")
    assert alert.evidence["metric"] == "eval/loss"
    assert "the loss of evaluations is worse" in alert.title
    assert alert.evidence["step"] == STEPS - 1


def test_steps_that_take_longer_on_the_same_machine_are_found(five):
    assert kinds(five.train("slower", 52, slower=2.0, marked=False)) == {"baseline.metric"}
    (alert,) = five.found("slower").alerts
    assert (alert.severity, alert.evidence["metric"]) == ("warning", "step_seconds")
    assert 1.9 < alert.evidence["times"] < 2.1
    # Of another machine nothing is said.
    other = {**CONFIG, "device": "cuda:0", "device_name": "H100"}
    assert kinds(five.train("elsewhere", 53, slower=2.0, config=other)) == set()


def test_the_alert_is_the_same_when_the_server_ends_in_between(five):
    whole = five.train("worse", 51, worse=0.3, marked=False)
    (alert,) = five.found("worse").alerts
    five.mark("main-0")
    drawn = {}

    def restarting(self=five, sweep=five.sweep):
        sweep()
        self.restart()

    five.sweep = restarting
    drawn = five.train("again", 51, worse=0.3, marked=False)
    assert drawn == whole
    (again,) = five.found("again").alerts
    assert (again.first_step, again.seen_step, again.last_step, again.title) == (
        *(alert.first_step, alert.seen_step, alert.last_step),
        alert.title,
    )
    for name in ("value", "expected", "limit", "baselines"):
        assert again.evidence[name] == alert.evidence[name]


def test_other_models_other_projects_and_later_runs_are_no_measure(project):
    assert kinds(project.train("first", 0, worse=5.0)) == set()
    assert project.found("first").checks["baseline.loss"].why == "The project has no baselines."
    for seed in range(1, 4):
        project.train(f"main-{seed}", seed, part=STEPS)
    seen = project.train("large", 9, worse=0.5, config={**CONFIG, "parameters": 2000})
    assert kinds(seen) == set()
    why = project.found("large").checks["baseline.loss"].why
    assert why == "None of the project's 4 baselines is of this model."


def test_those_with_the_nearest_settings_are_the_measure(five):
    high = {**CONFIG, "parameter_groups": [{"lr": 1.0, "momentum": 0.9}]}
    for seed in range(3):
        five.train(f"high-{seed}", 10 + seed, worse=0.5, config=high, part=STEPS)
    with reading(five.engine) as connection:
        found = None
        reader = learning.Learning(learning.Library())
        while found is None:
            found = reader.advance(
                connection,
                key=10**6,
                run="next",
                project="vision",
                world_size=RANKS,
                config={**high, "seed": 3},
            )
    assert set(found.runs) == {"high-0", "high-1", "high-2"}
    assert found.unlike == ()
    assert [s.key for s in found.differing] == ["seed"]
    # As good as these, and far from the others.
    assert kinds(five.train("as-high", 20, worse=0.5, config=high)) == set()
    # No setting of the project's is its own: who tries out some knows that some are worse.
    low = {**CONFIG, "parameter_groups": [{"lr": 0.01, "momentum": 0.9}]}
    assert kinds(five.train("low", 21, worse=9.0, config=low)) == {"baseline.loss"}
    (alert,) = five.found("low").alerts
    assert alert.severity == "info"
    assert "parameter_groups.0.lr 0.01 (there " in alert.cause


def test_what_all_baselines_have_is_what_the_project_does(five):
    low = {**CONFIG, "parameter_groups": [{"lr": 0.01, "momentum": 0.9}]}
    five.train("low", 21, worse=0.5, config=low)
    (alert,) = five.found("low").alerts
    assert alert.severity == "warning"
    assert "parameter_groups.0.lr 0.01 (there 0.1)" in alert.cause


def test_a_long_run_is_read_as_it_was_recorded(project):
    """Out of roll-ups, and out of what waits for them: the means of the steps of each bucket."""
    steps = 5000
    drawn = np.random.default_rng(0)
    values = {"loss": 1 + drawn.random((RANKS, steps))}
    for begin in range(0, steps, 500):
        project.post("long", begin, begin + 500, values, config=CONFIG, state="finished")
        if begin == 3500:
            while compact(project.engine, project.key("long")):
                pass
    project.mark("long")
    library = learning.Library()
    with reading(project.engine) as connection:
        (row,) = stored.before(connection, run=10**6, project="vision")
        found = library.of(connection, row)
    assert (found.first, found.last) == (0, steps - 1)
    loss = values["loss"].mean(axis=0)
    assert set(found.curves["loss"]) == set(widths(steps - 1)) == {1, 4, 16, 64}
    for width, curve in found.curves["loss"].items():
        for n in (0, 3, 77, 200):
            part = loss[n * width : (n + 1) * width]
            if len(part):
                assert curve[n] == pytest.approx(part.mean(), rel=1e-4), (width, n)
            else:
                assert np.isnan(curve[n])


@pytest.mark.parametrize(("project_of", "found"), [("vision", 2), ("default", 1)])
def test_where_no_project_is_named_only_what_is_marked_counts(project, project_of, found):
    for run in ("passed", "marked"):
        project.train(run, 1, steps=60, marked=False)
        with writing(project.engine) as connection:
            stored.say(connection, run=project.key(run), baseline=run)
            connection.execute(update(schema.run).values(project=project_of))
    with reading(project.engine) as connection:
        rows = stored.before(connection, run=10**6, project=project_of)
    assert len(rows) == found
    assert rows[0].id == "marked"


def test_a_baseline_that_cannot_be_read_hurts_no_other_run(five, caplog):
    with writing(five.engine) as connection:
        c = schema.chunk
        wrong = update(c).where(c.c.run == five.key("main-2")).values({"values": b"\x00\x01\x02"})
        connection.execute(wrong)
    # What was read of it before is forgotten.
    five.restart()
    assert kinds(five.train("good", 50)) == set()
    assert "the curves of baseline main-2 could not be read" in caplog.text
    check = five.found("good").checks["baseline.loss"]
    assert check.status == "ok"
    assert "4 baselines" in check.why
