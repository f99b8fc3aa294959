"""Secrets never leave the audit: every output string passes `Vault.mask`."""

from __future__ import annotations

import re
from functools import cache

from lvllm.audit.facts import Fact

MASK = "***"
_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY", re.I)
_NOT_SECRET = re.compile(
    r"TOKENIZER|TOKENS|TOKEN_(THRESHOLD|HEAD|IDS?|LIMIT|BUDGET|COUNT)|TOKENIZATION|FASTOKENS|"
    r"(PER|PAD|EOS|BOS|UNK|SPECIAL|STOP|MASK|SEP|CLS|IMAGE|NEW|MAX|MIN)_TOKEN",
    re.I,
)
_SHAPED = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|ghp_[A-Za-z0-9]{20,}|[0-9a-fA-F]{32,})(?![A-Za-z0-9])"
)
# NAME=value, NAME: value, --api-key value, "NAME", "value": the value runs to the next blank or quote.
_ASSIGNED = re.compile(
    r"""((?:--)?["']?([A-Za-z0-9_.-]*(?:token|secret|password|passwd|api[_-]?key)[A-Za-z0-9_-]*)["']?
    (?:\s*(?:=|:|,)\s*|[ \t]+))(?:(["'])([^"']*)\3|(\$\{[^}]*\}|[^\s"',;)}\]]+))""",
    re.I | re.X,
)
_PLACEHOLDER = re.compile(
    r"^(|empty|none|null|true|false|dummy|changeme|change-me|todo|xxx+|\*+|\.\.\.|<.*>|your.*|my[-_].*|\{.*\}|"
    r"\$.*|%.*|.*[(\[].*|token-abc123|sk-xxx.*|hf_xxx.*|hf_\.\.\..*|test|example.*|str|string|secret)$",
    re.I,
)
_REFERENCE = re.compile(r"^\$\{?[A-Za-z_][A-Za-z0-9_]*\}?$|^\$[({]|^\{\{|^os\.|^env\.")


@cache
def secret_name(name: str) -> bool:
    """True if a variable or option of this name holds a secret."""
    return _NAME.search(name.replace("-", "_")) is not None and not _NOT_SECRET.search(name.replace("-", "_"))


def shaped(text: str) -> bool:
    """True if the text holds a literal with the shape of an access token."""
    return _SHAPED.search(text) is not None


def placeholder(value: str) -> bool:
    """True for a stand-in that is no secret (``EMPTY``, ``<your key>``, ``$TOKEN``)."""
    return _PLACEHOLDER.match(value.strip()) is not None


class Vault:
    """The secret values seen so far."""

    def __init__(self) -> None:
        self._values: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        self._masked: dict[str, str] = {}

    def learn(self, value: object) -> None:
        """Remember a value of a secret name, so that it is masked wherever it occurs."""
        if isinstance(value, str) and len(value.strip()) >= 4 and not placeholder(value):
            self._values.add(value.strip())
            self._pattern = None
            self._masked.clear()
        elif isinstance(value, list):
            for item in value:
                self.learn(item)

    def learn_fact(self, fact: Fact) -> None:
        if secret_name(fact.name):
            self.learn(fact.value)

    def mask(self, text: str) -> str:
        """`text` with every secret replaced by ``***``."""
        known = self._masked.get(text)
        if known is None:
            known = self._masked[text] = self._mask(text)
        return known

    def _mask(self, text: str) -> str:
        if self._values:
            if self._pattern is None:
                longest = sorted(self._values, key=lambda v: (-len(v), v))
                self._pattern = re.compile("|".join(map(re.escape, longest)))
            text = self._pattern.sub(MASK, text)
        return _ASSIGNED.sub(_mask_assigned, _SHAPED.sub(MASK, text))

    def mask_tree(self, value: object) -> object:
        """`mask` on every string of a JSON value, keys included."""
        if isinstance(value, str):
            return self.mask(value)
        if isinstance(value, list):
            return [self.mask_tree(v) for v in value]
        if isinstance(value, dict):
            return {
                self.mask(k): MASK if isinstance(v, str) and secret_name(k) and v else self.mask_tree(v)
                for k, v in value.items()
            }
        return value


def _mask_assigned(match: re.Match[str]) -> str:
    head, name, quote, quoted, bare = match.groups()
    value = quoted if quoted is not None else bare
    separator = head.rpartition(name)[2]
    if not secret_name(name):
        return match.group(0)
    # Blanks alone separate an option from its value, a comma a quoted name from its value; prose has neither.
    if "=" not in separator and ":" not in separator:
        if "," in separator and separator[:1] not in "\"'":
            return match.group(0)
        if "," not in separator and not head.startswith("--"):
            return match.group(0)
    if not value or value == MASK or _REFERENCE.match(value):
        return match.group(0)
    return f"{head}{quote or ''}{MASK}{quote or ''}"
