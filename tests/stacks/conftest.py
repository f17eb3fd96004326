"""The fault lab's machinery is no part of the installed package."""

import sys
from pathlib import Path

REPOSITORY = str(Path(__file__).parents[2])

if REPOSITORY not in sys.path:
    # Last: nothing of the repository's top may hide an installed module.
    sys.path.append(REPOSITORY)
