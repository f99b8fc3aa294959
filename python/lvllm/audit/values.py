"""Reading of single values: booleans, human-readable integers, JSON, sizes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import yaml

from lvllm.audit.facts import Value

_HUMAN = re.compile(r"^(\d+(?:\.\d+)?)([kKmMgGtT])$")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_QUANTITY = re.compile(r"^(\d+(?:\.\d+)?)\s*([A-Za-z]*)$")
_GIB_UNITS = {
    "": 2**-30, "b": 2**-30, "k": 1e3 / 2**30, "kb": 2**-20, "ki": 2**-20, "kib": 2**-20,
    "m": 2**-10, "mb": 2**-10, "mi": 2**-10, "mib": 2**-10, "g": 1.0, "gb": 1.0, "gi": 1.0, "gib": 1.0,
    "t": 1024.0, "tb": 1024.0, "ti": 1024.0, "tib": 1024.0,
}  # fmt: skip


def human_int(text: str) -> int | None:
    """``1k`` = 1000, ``1K`` = 1024, ``25.6k`` = 25600; None if `text` is no such number.

    A fraction is allowed with the decimal suffixes only, as in vLLM's own parser.
    """
    match = _HUMAN.match(text.strip())
    if match is None:
        return None
    number, suffix = match.groups()
    if suffix in _DECIMAL:
        return int(float(number) * _DECIMAL[suffix])
    return None if "." in number else int(number) * _BINARY[suffix]


def boolean(value: Value) -> bool | None:
    """True / False for the spellings that YAML, shells and Hydra use; None otherwise."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        word = value.strip().lower()
        if word in ("true", "1", "yes", "on"):
            return True
        if word in ("false", "0", "no", "off"):
            return False
    return None


def scalar(text: str) -> Value:
    """A command-line word as a value: JSON if it is JSON, number, boolean, else text."""
    word = text.strip()
    if word[:1] in "{[" and word:
        try:
            return json.loads(word)
        except ValueError:
            return _flow_mapping(word)
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if word in ("None", "null"):
        return None
    try:
        return int(word)
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        human = human_int(word)
        return text if human is None else human
    return number if number == number and abs(number) != float("inf") else text


def _flow_mapping(word: str) -> Value:
    """A JSON-like value that is not JSON (single quotes, bare keys): YAML's flow style, else text."""
    try:
        value = yaml.safe_load(word)
    except (yaml.YAMLError, ValueError, RecursionError):
        return word
    return value if isinstance(value, dict | list) and is_plain(value) else word


def is_plain(value: Value) -> bool:
    """True if `value` is a finite JSON value (YAML can also make dates and the like)."""
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(is_plain(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str)


def number(value: Value) -> float | None:
    """`value` as a number, or None. Booleans are not numbers."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        parsed = scalar(value)
        if isinstance(parsed, int | float) and not isinstance(parsed, bool):
            return float(parsed)
    return None


def gib(value: Value) -> float | None:
    """A memory quantity (``64Gi``, ``512g``, ``1.5TiB``, bytes) in GiB, or None."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) / 2**30
    if not isinstance(value, str):
        return None
    match = _QUANTITY.match(value.strip())
    if match is None or match.group(2).lower() not in _GIB_UNITS:
        return None
    return float(match.group(1)) * _GIB_UNITS[match.group(2).lower()]


def cpus(value: Value) -> float | None:
    """A CPU quantity (``2``, ``"1500m"``) in cores, or None."""
    if isinstance(value, str) and value.strip().endswith("m"):
        milli = number(value.strip()[:-1])
        return None if milli is None else milli / 1000
    return number(value)


def index_ranges(text: str) -> list[tuple[int, int]] | None:
    """``0-3,8`` as [(0, 3), (8, 8)] in written order, or None if it is not such a list."""
    ranges = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.strip().isdigit() or (dash and not high.strip().isdigit()):
            return None
        ranges.append((int(low), int(high) if dash else int(low)))
    return ranges


def edit_distance(a: str, b: str, limit: int) -> int:
    """Levenshtein distance, or `limit` + 1 as soon as it is known to be larger."""
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    row = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, cb in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (ca != cb))
        if min(row) > limit:
            return limit + 1
    return row[-1]


def nearest(word: str, known: Sequence[str], limit: int = 2) -> str | None:
    """The known name closest to `word` within `limit` edits; ties go to the first."""
    best: tuple[int, str] | None = None
    for name in known:
        distance = edit_distance(word, name, limit)
        if distance <= limit and (best is None or distance < best[0]):
            best = (distance, name)
    return None if best is None else best[1]
