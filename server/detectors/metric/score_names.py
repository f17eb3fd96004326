"""What the name of a series says of it: that higher is better, or that it is a reward. Pure."""

from __future__ import annotations

import re
from functools import cache

from rankscope.server.detectors.metric.series import is_logged

# Parts of a name, one of which says that it is what an agent was given for what it did.
REWARDS = frozenset("reward rewards return returns".split())
# Those of which one says that higher is better ...
_HIGHER = REWARDS | frozenset(
    "score scores accuracy acc f1 auc auroc auprc map bleu rouge psnr ssim iou miou dice recall "
    "precision ndcg mrr success".split()
)
# ... and those with which it may be of something else: a spread or a setting of it, what is added
# to explore, or the score of what is to be refused.
OF_SOMETHING_ELSE = frozenset(
    "std var variance min lr rate weight coef scale count num len length steps time target "
    "baseline grad norm kl entropy intrinsic bonus curiosity novelty shaping penalty cost fake "
    "real generated fid critic discriminator disc anomaly outlier opponent chosen rejected eps "
    "temperature noise threshold thr best size bits".split()
)
_ERRORS = frozenset("loss error err".split())
_PARTS = re.compile(r"[a-z]+\d*|[A-Z]+(?![a-z])\d*|[A-Z][a-z]+\d*")
_WORDS = re.compile(r"[a-z]+\d*")
# The series among which rewards are, as patterns.
OF_REWARDS = frozenset(f"*{word}*" for word in ("reward", "Reward", "return", "Return"))


@cache
def parts_of(name: str) -> frozenset[str]:
    """The words that a name consists of, in lower case: of `IoU` and `valAcc`, too."""
    words = (part.lower() for part in _PARTS.findall(name))
    return frozenset(words).union(_WORDS.findall(name.lower()))


@cache
def rises(name: str) -> bool:
    """Whether the name of a user's series says that higher is better."""
    parts = parts_of(name)
    return is_logged(name) and bool(parts & _HIGHER) and not parts & (OF_SOMETHING_ELSE | _ERRORS)


@cache
def is_reward(name: str) -> bool:
    """Whether a series is what an agent was given for what it did.

    A model of rewards, or of preferences, has accuracies and margins of them, and a loss that has
    to fall.
    """
    parts = parts_of(name)
    other = _HIGHER - REWARDS | {"margin", "margins", "accuracies", "model", "rm", "dpo"}
    return rises(name) and bool(parts & REWARDS) and not parts & other
