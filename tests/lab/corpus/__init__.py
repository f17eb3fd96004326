"""Real small trainings, healthy and broken, on which the detectors are calibrated."""

import sys
from pathlib import Path

# A recorded training is what the tests replay, so its class lives with their helpers.
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
