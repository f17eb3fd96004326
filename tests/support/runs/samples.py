"""What ranks report of the samples that they read, for ways of dealing a data set to them."""

from functools import cache

import numpy as np

from rankscope.agent.wire import NO_SAMPLE, SAMPLE_DIGESTS

# Half of what an agent reports now: what older ones reported must be understood, too.
_ROWS = 8


@cache
def order(*seed, size):
    return np.random.default_rng(seed).permutation(size)


def read(way, *, seed, step, rank, ranks, epoch, batch):
    """Numbers of the samples in a batch, of a set of `epoch * ranks * batch`.

    Ways: `dealt` (one order for all, each rank its part), `own-orders` (an order of each rank's
    own), `drawn` (at random from all), `rotated` (parts stay, and go to the next rank each epoch),
    `twice` (dealt, of a set that holds everything twice), `padded` (dealt, a rank's last one is
    another rank's first one), `kept` (parts stay with their ranks).
    """
    size = epoch * ranks * batch
    turn, place = divmod(step, epoch)
    if way == "drawn":
        return np.random.default_rng((seed, step, rank)).integers(size, size=batch)
    if way == "own-orders":
        own = order(seed, turn, rank, size=size)[rank::ranks]
    elif way in ("rotated", "kept"):
        part = (rank + turn) % ranks if way == "rotated" else rank
        own = np.random.default_rng((seed, turn, part)).permutation(epoch * batch) * ranks + part
    else:
        own = order(seed, turn, size=size)[rank::ranks]
    chosen = own[place * batch : (place + 1) * batch].copy()
    if way == "twice":
        chosen //= 2
    if way == "padded" and place == epoch - 1 and rank:
        chosen[-1] = order(seed, turn, size=size)[0]
    return chosen


def words(samples, digest):
    """The digests that the agent posts of a batch: of itself, and of its samples."""
    hashes = sorted(digest("sample", int(s)) >> 12 for s in samples)[:_ROWS]
    ids = [h & NO_SAMPLE for h in hashes] + [NO_SAMPLE] * (_ROWS - len(hashes))
    pairs = {
        name: one << 32 | other
        for name, one, other in zip(SAMPLE_DIGESTS, ids[::2], ids[1::2], strict=False)
    }
    return {"batch": digest("batch", *(int(s) for s in samples)), **pairs}
