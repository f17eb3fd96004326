"""What one rank posted of one series, as the evaluation reads it."""

from itertools import count

import numpy as np

from rankscope.server.window import Columns

_ARRIVALS = count(1)


def of_rank(rank, attempt, name, steps, values):
    """Values of one rank and one series, or stage, that arrived after all that were made before."""
    return Columns(
        np.array([rank]),
        np.array([next(_ARRIVALS)]),
        attempt,
        (name,),
        np.asarray(steps, np.int64),
        np.asarray(values)[None, None],
    )
