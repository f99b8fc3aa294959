"""Lines of keys in formats whose parsers give none (TOML, JSON)."""

from __future__ import annotations

import re
from collections.abc import Iterable


def key_line(text: str, path: Iterable[str]) -> int:
    """The line of the last key of `path`: each key is looked for after the one before it."""
    at = 0
    for key in path:
        match = re.compile(rf"""(?<![\w.-])["']?{re.escape(key)}["']?(?![\w-])""").search(text, at)
        if match is None:
            break
        at = match.start()
    return text.count("\n", 0, at) + 1


def text_line(text: str, needle: str, after: int = 0) -> int:
    """The line of the first occurrence of `needle`, or 1."""
    at = text.find(needle, after)
    return text.count("\n", 0, at) + 1 if at >= 0 else 1
