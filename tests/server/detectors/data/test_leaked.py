"""What is said of targets that the model was given, once it is given them no more."""

from rankscope.server.detectors.data.leaked import TargetsLeaked
from tests.support.judging import judge
from tests.support.runs.phases import next_tokens


def test_it_does_not_depend_on_what_came_after():
    made = next_tokens(0, seen=0.05, unseen=3.0, until=200)
    whole, cut = (judge(made, [TargetsLeaked()], cuts).alerts for cuts in ((), range(0, 300, 33)))
    assert [(a.state, a.evidence, a.cause) for a in whole] == [
        (a.state, a.evidence, a.cause) for a in cut
    ]
    assert whole[0].state == "resolved"
    assert whole[0].evidence["samples"] <= 200
