"""What is said of settings of modules, of one and of several."""

import pytest

from rankscope.server.detectors.mode.settings import ModeSettings
from tests.support.judging import judge
from tests.support.runs.phases import module_settings


@pytest.mark.parametrize(
    ("said", "title"),
    [
        ({"still": ["one"]}, "1 normalization keeps the statistics it was made with"),
        ({"still": ["one", "two"]}, "2 normalizations keep the statistics they were made with"),
        ({"dropping": [["drop", 0.95]]}, "`drop` drops 95 % of the units"),
        ({"dropping": [["a", 0.95], ["b", 0.9]]}, "2 dropout modules drop up to 95 % of the units"),
    ],
)
def test_titles(said, title):
    (alert,) = judge(module_settings(0, said=said), [ModeSettings()]).alerts
    assert alert.title == title
