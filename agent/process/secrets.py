"""Text without what looks like a secret, before it leaves the process."""

from __future__ import annotations

import re
from collections.abc import Mapping

MASK = "***"
# Each pattern begins where a word does, and what it repeats has a bound: a line of a million dots,
# or of one word, is gone through once. The search holds the interpreter, and the training with it.
_BEGIN = r"(?<![\w.-])"
_NAME = (
    r"[\w.-]{0,64}?"
    r"(?:token|secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|credentials)"
    r"(?:_\w{1,64})?"
)
# A name that says what it is, and its value: `HF_TOKEN=...`, `"api_key": "..."`, `--password ...`.
# Trainings say `token=4096`, too: what is a number is none.
_NAMED = re.compile(
    rf"(?i)((?:{_BEGIN}{_NAME}[\"']?\s{{0,8}}[=:]\s{{0,8}}|{_BEGIN}--{_NAME}\s{{1,8}})[\"']?)"
    rf"(?![\d.,]{{1,64}}(?:\s|$))([^\s\"',;]{{4,}})"
)
_BEARER = re.compile(r"(?i)\b((?:bearer|basic)\s+)[\w.~+/=-]{8,}")
_IN_ADDRESS = re.compile(r"(?i)(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,20}://)[^\s/@]{1,512}@")
# Keys that are known by how they begin: GitHub, Hugging Face, OpenAI, AWS, Slack, Google, and JWT.
_KNOWN = re.compile(
    r"\b(?:gh[pousr]_|github_pat_|hf_|sk-|AKIA|ASIA|xox[abpr]-|AIza|rsk_|eyJ[\w-]{1,512}\.eyJ)"
    r"[\w.-]{8,}"
)
_PRIVATE = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END[^\n]*|\Z)", re.DOTALL)
# Of a key whose first line is no longer there: nothing but base64 from end to end.
_BASE64 = re.compile(r"(?m)^[+ -]?[A-Za-z0-9+/]{60,76}={0,2}$")
_OF_ENVIRONMENT = re.compile(r"(?i)key|token|secret|passw|credential|auth")
# Shorter values of variables are words and numbers that stand anywhere.
_SHORTEST = 8


def masked(text: str, environ: Mapping[str, str]) -> str:
    """The text with `***` in place of secrets, as far as they can be told.

    Args:
        environ: variables of the process; values of those that are called like secrets are masked
            wherever they stand.
    """
    held = {v for n, v in environ.items() if _OF_ENVIRONMENT.search(n) and len(v) >= _SHORTEST}
    for value in sorted(held, key=len, reverse=True):
        text = text.replace(value, MASK)
    text = _PRIVATE.sub(MASK, text)
    text = _BASE64.sub(MASK, text)
    text = _IN_ADDRESS.sub(rf"\1{MASK}@", text)
    text = _BEARER.sub(rf"\1{MASK}", text)
    text = _KNOWN.sub(MASK, text)
    return _NAMED.sub(rf"\1{MASK}", text)
