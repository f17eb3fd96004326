"""The fault lab, for tests: benchmarks are no part of the installed package."""

import importlib
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

if str(REPOSITORY) not in sys.path:
    # Last: nothing of the repository's top may hide an installed module.
    sys.path.append(str(REPOSITORY))

case = importlib.import_module("benchmarks.faultlab.case")
lab = importlib.import_module("benchmarks.faultlab.lab")
scoring = importlib.import_module("benchmarks.faultlab.score")
CASES = importlib.import_module("benchmarks.faultlab.families").REGISTRY.cases
results = importlib.import_module("benchmarks.faultlab.results")
