"""What follows from what, among several families; a detector declares `effects` of its own."""

from __future__ import annotations

from functools import cache

from rankscope.server import detectors
from rankscope.server.alerts.chain_rules import CHAIN_RULES
from rankscope.server.alerts.course_rules import COURSE_RULES
from rankscope.server.detectors.effects import Rule

# Where several lines fit, the upper one holds: what broke a link explains a curve first.
RULES = (*CHAIN_RULES, *COURSE_RULES)


@cache
def rules() -> tuple[Rule, ...]:
    """The table, and below it what each detector declares, in the order of the registry."""
    declared = [rule for detector in detectors.installed().detectors for rule in detector.effects]
    return (*RULES, *declared)
