"""Run ids that a person can read, say and remember."""

from __future__ import annotations

import hashlib
import re
import secrets
from datetime import datetime

from rankscope.agent.wire import MAX_NAME_LENGTH

_ADJECTIVES = (
    "amber ample azure bold brave brief bright brisk broad calm civil clear cool crisp deep dry "
    "eager early fair fine firm fleet fond fresh frosty gentle glad golden grand green hardy hazy "
    "humble jolly keen kind late lean light lively lucid mellow merry mild misty modest neat noble "
    "odd pale plain proud quick quiet rapid royal rustic silent sleek smooth snowy stout swift wise"
).split()
_ANIMALS = (
    "badger bear beaver bison bittern boar bobcat buzzard camel caribou condor coot crane cricket "
    "curlew deer dingo dolphin dove dunlin eagle egret eider elk falcon ferret finch fox gannet "
    "gecko goose grouse gull hare harrier hawk heron hornet ibex ibis jackdaw jay kestrel kite "
    "lark linnet lynx marten merlin mole moose newt osprey otter owl petrel pika plover puffin "
    "raven robin seal shrike stoat"
).split()

_MAX_SCRIPT = 40  # characters of a script's name; the id is to be read, said and put in a column
# What stands in the place of a script where Python was started with `-c`, or reads from a terminal,
# and what starts the kernel of a notebook.
_NAMELESS = frozenset(("", "-c", "-m", "-", "ipykernel_launcher.py", "colab_kernel_launcher.py"))


def fresh(now: datetime, entropy: bytes | None = None, *, script: str = "") -> str:
    """A new id with script and day in it, for example `train-vae-brisk-heron-0421-3f9c`.

    Args:
        now: time of the trainer's own clock.
        script: file name of what was started; empty where there is none, as in a notebook.
        entropy: at least 4 bytes, drawn from the system's where not given. Never from `random`,
            whose state belongs to the trainer.
    """
    drawn = entropy if entropy is not None else secrets.token_bytes(4)
    made = f"{_words(drawn)}-{now:%m%d}-{drawn[2:4].hex()}"
    name = _of_script(script)
    return f"{name}-{made}" if name else made


def derived(*facts: str) -> str:
    """The id that everybody makes who knows the same facts, for example `calm-otter-91c04e2b`."""
    digest = hashlib.sha256("\0".join(facts).encode("utf-8", "surrogateescape")).digest()
    return f"{_words(digest)}-{digest[2:6].hex()}"


def from_launcher(given: str) -> str:
    """The id that a launcher or its user chose, as it may stand in an address.

    A random UUID, as `torchrun --standalone` draws it, is made readable.
    """
    if re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", given):
        return derived("uuid", given.lower())
    plain = "".join(c if c.isprintable() and c not in "/\\" else "-" for c in given).strip()
    return plain[:MAX_NAME_LENGTH] if plain.strip(".") else derived("launcher", given)


def _of_script(script: str) -> str:
    """The name of a script as it may stand in an address without being escaped, or empty."""
    if script in _NAMELESS:
        return ""
    name = re.sub(r"\.(py|pyc|pyz|ipynb)$", "", script, flags=re.IGNORECASE)
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", name)
    return plain[:_MAX_SCRIPT].strip("-._")


def _words(drawn: bytes) -> str:
    return f"{_ADJECTIVES[drawn[0] % 64]}-{_ANIMALS[drawn[1] % 64]}"
