"""YAML with line numbers: plain values plus the line of every key and item.

Composed by PyYAML (its C scanner where present) and converted here with a budget
of nodes, so that alias bombs and deep nesting end in an error instead of memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from lvllm.audit.facts import Value, Word

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_NODES = 200_000
MAX_DEPTH = 100

Path = tuple[str | int, ...]


class YamlError(ValueError):
    """The text is no YAML, or more than the audit is ready to read."""


@dataclass(slots=True)
class Doc:
    """One YAML document: `value` and, for each path into it, the line (1-based)."""

    value: Value
    lines: dict[Path, int] = field(default_factory=dict)
    ends: dict[Path, int] = field(default_factory=dict)
    """Last line of scalars that span several."""
    source: list[str] = field(default_factory=list)
    first_line: int = 1

    def line(self, *path: str | int) -> int:
        """The line of the nearest known ancestor of `path`."""
        key: Path = path
        while key and key not in self.lines:
            key = key[:-1]
        return self.lines.get(key, 1)

    def relocate(self, words: list[Word], *path: str | int) -> list[Word]:
        """The words of a multi-line scalar, each with the line on which it is written."""
        end = self.ends.get(path)
        if end is None:
            return words
        line = self.line(*path)
        placed = []
        for word in words:
            probe = word.raw.strip("'\"") or word.value
            for candidate in range(line, end + 1):
                index = candidate - self.first_line
                if index < len(self.source) and probe in self.source[index]:
                    line = candidate
                    break
            placed.append(Word(word.value, word.raw, line, word.state))
        return placed


def load_all(text: str, first_line: int = 1) -> list[Doc]:
    """Every document of `text`; raises `YamlError`."""
    docs = []
    loader = None
    source = text.splitlines()
    try:
        loader = _Loader(text)
        while loader.check_node():
            node = loader.get_node()
            doc = Doc(None, source=source, first_line=first_line)
            doc.value = _Converter(doc, loader, first_line).convert(node, (), 0)
            docs.append(doc)
    except YamlError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + first_line}" if mark is not None else ""
        raise YamlError(f"not valid YAML{where}") from error
    finally:
        if loader is not None:
            loader.dispose()
    return docs


class _Converter:
    def __init__(self, doc: Doc, loader: Any, first_line: int) -> None:
        self.doc = doc
        self.loader = loader
        self.first_line = first_line
        self.budget = MAX_NODES

    def convert(self, node: Any, path: Path, depth: int) -> Value:
        self.budget -= 1
        if self.budget < 0 or depth > MAX_DEPTH:
            raise YamlError("more nodes or deeper nesting than the audit reads")
        self.doc.lines.setdefault(path, node.start_mark.line + self.first_line)
        if isinstance(node, yaml.ScalarNode) and node.end_mark.line > node.start_mark.line:
            self.doc.ends[path] = node.end_mark.line + self.first_line
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.convert(item, (*path, i), depth + 1) for i, item in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: Any, path: Path, depth: int) -> dict[str, Value]:
        result: dict[str, Value] = {}
        merged: dict[str, Value] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for source in sources:
                    extra = self.convert(source, (*path, "<<"), depth + 1)
                    if isinstance(extra, dict):
                        for k, v in extra.items():
                            merged.setdefault(k, v)
                continue
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
            child = (*path, key)
            self.doc.lines[child] = key_node.start_mark.line + self.first_line
            result[key] = self.convert(value_node, child, depth + 1)
        for k, v in merged.items():
            result.setdefault(k, v)
        return result

    def _scalar(self, node: Any) -> Value:
        tag = node.tag.rpartition(":")[2]
        if tag in ("int", "float", "bool", "null"):
            try:
                value = getattr(self.loader, f"construct_yaml_{tag}")(node)
            except (ValueError, yaml.YAMLError, IndexError, KeyError):
                return str(node.value)
            finite = not isinstance(value, float) or abs(value) < float("inf")
            return value if finite else str(node.value)
        return str(node.value)
