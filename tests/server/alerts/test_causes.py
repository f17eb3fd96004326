"""Which alert follows from which."""

from rankscope.server.alerts import causes, rules
from rankscope.server.detectors.registry import KINDS
from tests.support.incidents import alert, forever, linked


def parents(*alerts):
    """Kind of the root of each alert that has one, by the alert's id."""
    found = linked(alerts)
    return {a.id: found[a.parent].kind for a in found.values() if a.parent}


def test_a_chain_hangs_under_its_first_link():
    found = parents(
        forever("desync.parameters", 10, ranks=(1,)),
        alert("rank.loss_outlier", 20, ranks=(1,), last_step=200, clear_after=50),
        alert("loss.spike", 30),
        alert("loss.nonfinite", 40, clear_after=50),
    )
    assert set(found.values()) == {"desync.parameters"}
    assert len(found) == 3


def test_spikes_in_a_row_are_one_even_if_the_last_is_far_from_the_first():
    found = linked([alert("loss.spike", step) for step in (10, 50, 95, 140)])
    assert [a.id for a in found.values() if a.parent is None] == ["loss.spike@10"]
    assert found["loss.spike@10"].consequences == (
        "loss.spike@50",
        "loss.spike@95",
        "loss.spike@140",
    )


def test_a_root_does_not_begin_long_after_what_hangs_under_it():
    """Each is within the blur of the next; all in all that would be too much."""
    found = linked(
        [alert("loss.spike", 100), alert("loss.oscillating", 115), alert("loss.diverging", 130)]
    )
    (root,) = (a for a in found.values() if a.parent is None)
    assert root.first_step <= 120
    assert len(root.consequences) == 2


def test_the_same_ranks_in_two_links_of_the_chain():
    found = linked(
        [
            forever("desync.gradients", 10, stage="reduced_gradient", ranks=(1,)),
            forever("desync.parameters", 10, stage="parameters", ranks=(1,)),
            forever("desync.optimizer", 90, stage="optimizer_state", ranks=(3,)),
        ]
    )
    roots = [a.kind for a in found.values() if a.parent is None]
    assert roots == ["desync.gradients", "desync.optimizer"]


def test_the_reason_is_reported():
    root, consequence = forever("desync.parameters", 10), alert("loss.diverging", 40)
    assert causes.explain(root, consequence) == (
        "It follows from desync.parameters since step 10: "
        "ranks that hold different parameters train different models."
    )
    before = (root, consequence)
    changed = causes.link(before)
    (reported,) = causes.transitions(before, changed, through_step=41, now=7.0)
    assert (reported.alert_id, reported.step, reported.at, reported.what) == (
        consequence.id,
        41,
        7.0,
        "linked",
    )
    assert reported.reason == causes.explain(root, consequence)


def test_what_no_longer_follows_stands_alone_again():
    root, consequence = forever("desync.parameters", 10, ranks=(1,)), alert("loss.spike", 10)
    found = linked([root, consequence])
    spike = found[consequence.id]
    changed = causes.link((spike,))
    assert changed[0].parent is None
    (reported,) = causes.transitions((spike,), changed, through_step=50, now=0.0)
    assert reported.reason == "It no longer counts as a consequence of another alert."


def test_every_rule_has_a_sentence_and_known_kinds():
    for rule in rules.rules():
        assert rule.why
        assert not rule.why.endswith(".")
        for name in (*rule.root, *rule.consequence):
            assert any(kind == name or kind.startswith(name) for kind in KINDS)
