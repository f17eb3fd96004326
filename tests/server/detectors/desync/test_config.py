"""How ranks that were started differently are distinguished in words."""

import numpy as np
import pytest

from rankscope.server.detectors.desync.config import Config
from rankscope.server.window import Window


def reported(configs):
    ranks = np.arange(len(configs))
    window = Window(
        world_size=len(configs),
        ranks=ranks,
        steps=np.array([0]),
        series={},
        last_step=0,
        configs=dict(enumerate(configs)),
        begins=dict.fromkeys(range(len(configs)), (0,)),
    )
    detector = Config()
    (finding,) = detector.advance(window, detector.start()).findings
    return finding


def test_ranks_that_a_job_goes_on_without_are_not_compared():
    window = Window(
        world_size=2,
        ranks=np.arange(4),
        steps=np.array([40]),
        series={},
        last_step=40,
        configs=dict(
            enumerate([{"torch": "2.13.0"}, {"torch": "2.12.0"}, *[{"torch": "2.4.0"}] * 2])
        ),
        begins={0: (0, 32), 1: (0, 32), 2: (0,), 3: (0,)},
    )
    detector = Config()
    (finding,) = detector.advance(window, detector.start()).findings
    assert (finding.ranks, finding.first_step) == ((0, 1), 0)
    assert "2.4.0" not in finding.cause


def started(*, frozen=None, trained=None):
    names = {"frozen": frozen} if trained is None else {"trained": trained}
    return {"parameters_digest": "p", "trainable_digest": str(names), **names}


@pytest.mark.parametrize(
    ("configs", "suspects", "says"),
    [
        (
            [started(frozen=[])] * 3 + [started(frozen=["head.weight", "head.bias"])],
            (3,),
            "`head.weight` and `head.bias` are frozen on rank 3 only",
        ),
        (
            [started(frozen=["body"])] * 2 + [started(frozen=[]), started(frozen=["body"])],
            (2,),
            "`body` is frozen on ranks 0, 1 and 3 only",
        ),
        (
            [started(trained=["head"])] * 2 + [started(trained=["head", "adapter"])],
            (2,),
            "`adapter` is frozen on ranks 0 and 1 only",
        ),
    ],
)
def test_which_ranks_do_not_train_what(configs, suspects, says):
    finding = reported(configs)
    assert finding.ranks == suspects
    assert says in finding.cause


def built(*, tied, digest, **more):
    return {
        "model": "Net",
        "modules": {"Linear": 2},
        "module_settings": {"Linear.bias": {"True": 2}},
        "parameters_digest": digest,
        "tied": tied,
    } | more


def test_what_is_tied_on_one_rank_alone_gives_it_fewer_parameters():
    finding = reported([built(tied=[["a", "b"]], digest="p"), built(tied=[], digest="q")])
    assert (finding.severity, finding.ranks) == ("warning", (0, 1))
    assert "which parameters are tied" in finding.title


def test_stages_of_a_pipeline_tie_what_they_hold():
    stages = [
        built(tied=[["a", "b"]], digest="p"),
        built(tied=[], digest="q", modules={"Linear": 3}),
    ]
    window = Window(
        world_size=2,
        ranks=np.arange(2),
        steps=np.array([0]),
        series={},
        last_step=0,
        configs=dict(enumerate(stages)),
        begins={0: (0,), 1: (0,)},
    )
    detector = Config()
    assert detector.advance(window, detector.start()).findings == ()


def test_what_ddp_has_wrapped_on_all_ranks_is_no_stage_of_a_pipeline():
    together = {"data_parallel": {"group_size": 2}}
    finding = reported(
        [
            built(tied=[], digest="p", **together),
            built(tied=[], digest="q", modules={"Linear": 3}, **together),
        ]
    )
    assert (finding.severity, finding.ranks) == ("critical", (0, 1))
    assert '{"Linear": 2} on rank 0 and {"Linear": 3} on rank 1' in finding.cause
