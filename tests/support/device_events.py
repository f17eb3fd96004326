"""A device without one: events whose times a test sets, and which pass when it says so."""

import time


class FakeMark:
    def __init__(self, events):
        self.events = events
        self.record()

    def record(self):
        self.at = self.events.now()
        self.recorded = self.events.recorded = self.events.recorded + 1

    def passed(self):
        # An event passes when the device has done what lies before it: one mark behind, at least.
        return self.recorded <= self.events.recorded - self.events.behind

    def seconds_since(self, earlier):
        for mark in (self, earlier):
            assert mark.passed(), "the time of an event that has not passed"
        return self.at - earlier.at


class FakeEvents:
    """Of a device that is some marks behind the host.

    Attributes:
        now: the device's clock, seconds.
        behind: marks that have not passed, of the last ones.
    """

    def __init__(self, now=time.perf_counter, behind=0):
        self.now = now
        self.behind = behind
        self.recorded = 0

    def measure(self, tensor):
        return True

    def mark(self, tensor):
        return FakeMark(self)
