"""Shell scripts, parsed by tree-sitter's Bash grammar: simple commands with their environment.

Yields every simple command in order with its words expanded as far as the file
itself tells: constants assigned in the file, ``${VAR:-default}``, arrays. What a
caller decides (positional parameters, substitutions, unknown variables) makes the
word dynamic. Nothing is ever run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import tree_sitter_bash
from tree_sitter import Language, Parser

from lvllm.audit.facts import State, Word

if TYPE_CHECKING:
    from tree_sitter import Node

_BRANCHES = frozenset(
    (
        "if_statement",
        "case_statement",
        "while_statement",
        "for_statement",
        "function_definition",
        "elif_clause",
    )
)
MAX_DEPTH = 200
MAX_WORD = 20_000
MAX_WORDS = 5_000


@cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


@dataclass(slots=True)
class Variable:
    """A shell variable: its words, how it was obtained and where."""

    words: list[Word]
    state: State
    line: int
    exported: bool = False

    @property
    def text(self) -> str:
        return " ".join(w.value for w in self.words)


@dataclass(slots=True)
class Command:
    """One simple command. `prefix` are its own ``NAME=value`` words, `exported` what came before."""

    words: list[Word]
    prefix: dict[str, Word]
    exported: dict[str, Variable]
    line: int
    heredoc: tuple[int, str] | None = None


@dataclass(slots=True)
class Script:
    """A parsed script: its commands in order and the variables at its end."""

    commands: list[Command] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)


def parse(text: str, first_line: int = 1, variables: dict[str, Variable] | None = None) -> Script:
    """Parse `text`; syntax errors cost only the statement they are in."""
    source = text.encode("utf-8", "replace")
    walker = _Walker(source, first_line)
    walker.script.variables.update(variables or {})
    walker.statements(_parser().parse(source).root_node, 0, branch=False)
    return walker.script


class _Walker:
    def __init__(self, source: bytes, first_line: int) -> None:
        self.source = source
        self.first_line = first_line
        self.script = Script()

    def text(self, node: Node) -> str:
        return self.source[node.start_byte : node.end_byte].decode("utf-8", "replace")

    def line(self, node: Node) -> int:
        return int(node.start_point[0]) + self.first_line

    def statements(self, node: Node, depth: int, *, branch: bool) -> None:
        if depth > MAX_DEPTH:
            return
        handler: dict[str, Callable[[Node, bool], None]] = {
            "command": self._command,
            "declaration_command": self._declaration,
            "variable_assignment": self._assign,
        }
        for child in node.named_children:
            kind = child.type
            if kind in handler:
                handler[kind](child, branch)
            elif kind == "variable_assignments":
                for one in child.named_children:
                    self._assign(one, branch)
            elif kind == "redirected_statement":
                self._redirected(child, depth, branch)
            elif kind in ("comment", "heredoc_body", "test_command"):
                continue
            else:
                self.statements(child, depth + 1, branch=branch or kind in _BRANCHES)

    def _redirected(self, node: Node, depth: int, branch: bool) -> None:
        before = len(self.script.commands)
        self.statements(node, depth + 1, branch=branch)
        for child in node.named_children:
            if child.type != "heredoc_redirect":
                continue
            body = next((c for c in child.named_children if c.type == "heredoc_body"), None)
            if body is not None and len(self.script.commands) > before:
                self.script.commands[before].heredoc = (self.line(body), self.text(body))

    def _assign(self, node: Node, branch: bool, *, exported: bool = False) -> None:
        name_node = node.child_by_field_name("name")
        if name_node is None:
            return
        name = self.text(name_node).partition("[")[0]
        value_node = node.child_by_field_name("value")
        words = self.expand(value_node) if value_node is not None else []
        state = State.LITERAL
        for word in words:
            if word.state is not State.LITERAL:
                state = word.state if state is not State.DYNAMIC else state
        old = self.script.variables.get(name)
        appended = "+=" in self.text(node)[: len(self.text(name_node)) + 2]
        if appended and old is not None:
            is_array = value_node is not None and value_node.type == "array"
            joined = [*old.words, *words]
            if not is_array and old.words and words:
                text = old.words[-1].value + words[0].value
                joined = [*old.words[:-1], Word(text, text, self.line(node), state), *words[1:]]
            words = joined
            state = old.state if old.state is not State.LITERAL else state
        elif branch and old is not None and old.text != " ".join(w.value for w in words):
            state = State.DYNAMIC
        elif branch and old is None and state is State.LITERAL:
            state = State.DEFAULT_OF
        if appended and branch:
            state = State.DEFAULT_OF if state is State.LITERAL else state
        self.script.variables[name] = Variable(
            words, state, self.line(node), exported or bool(old and old.exported)
        )

    def _declaration(self, node: Node, branch: bool) -> None:
        keyword = node.child(0)
        exported = keyword is not None and self.text(keyword) in ("export", "declare", "typeset")
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._assign(child, branch, exported=exported)
            elif child.type == "variable_name" and exported:
                old = self.script.variables.get(self.text(child))
                if old is not None:
                    old.exported = True

    def _command(self, node: Node, _branch: bool) -> None:
        words: list[Word] = []
        prefix: dict[str, Word] = {}
        for child in node.named_children:
            if child.type == "variable_assignment":
                name_node = child.child_by_field_name("name")
                value_node = child.child_by_field_name("value")
                if name_node is None:
                    continue
                values = self.expand(value_node, quoted=True) if value_node is not None else []
                empty = Word("", "", self.line(child))
                prefix[self.text(name_node)] = values[0] if values else empty
            elif child.type in ("file_redirect", "heredoc_redirect", "herestring_redirect", "comment"):
                continue
            elif child.type == "command_name":
                words += [w for c in child.named_children for w in self.expand(c)] or [self._plain(child)]
            else:
                words += self.expand(child)
        if words:
            exported = {k: v for k, v in self.script.variables.items() if v.exported}
            self.script.commands.append(Command(words[:MAX_WORDS], prefix, exported, self.line(node)))
            if words[0].value == "export":
                for word in words[1:]:
                    name, equals, value = word.value.partition("=")
                    if equals and name.isidentifier():
                        item = Word(value, value, word.line, word.state)
                        self.script.variables[name] = Variable([item], word.state, word.line, True)

    def _plain(self, node: Node) -> Word:
        text = self.text(node)
        return Word(text, text, self.line(node))

    # -- expansion ---------------------------------------------------------------------------------

    def expand(self, node: Node, *, quoted: bool = False) -> list[Word]:
        """The words that a node stands for."""
        raw = self.text(node)
        line = self.line(node)
        if node.type == "array":
            return [w for child in node.named_children if child.type != "comment" for w in self.expand(child)]
        if node.type == "string":
            inner = [c for c in node.named_children if c.type in ("expansion", "simple_expansion")]
            if len(inner) == 1 and raw == f'"{self.text(inner[0])}"' and "[@]" in raw:
                found = self._lookup(inner[0])
                if found is not None:
                    return [Word(w.value, w.raw, line, w.state) for w in found.words]
            return [self._fold(node, raw, line)]
        if node.type in ("simple_expansion", "expansion"):
            found = self._lookup(node)
            if found is not None and not quoted:
                return self._split(found, raw, line)
        return [self._fold(node, raw, line)]

    def _split(self, found: Variable, raw: str, line: int) -> list[Word]:
        """Unquoted expansion: the value is split at blanks."""
        words = []
        for word in found.words:
            state = word.state if found.state is State.LITERAL else found.state
            pieces = _split_blanks(word.value)
            if len(pieces) == 1 and len(found.words) == 1:
                words.append(Word(pieces[0], raw, line, state))
            else:
                words += [Word(p, p, line, state) for p in pieces]
        return words

    def _fold(self, node: Node, raw: str, line: int) -> Word:
        """One word out of a node with parts."""
        parts: list[str] = []
        state = State.LITERAL
        for text, part_state in self._parts(node, 0):
            parts.append(text)
            if part_state is State.DYNAMIC or state is State.LITERAL:
                state = part_state if part_state is not State.LITERAL else state
        return Word("".join(parts)[:MAX_WORD], raw, line, state)

    def _parts(self, node: Node, depth: int) -> Iterator[tuple[str, State]]:
        kind = node.type
        if depth > MAX_DEPTH:
            yield self.text(node), State.DYNAMIC
        elif kind == "raw_string":
            yield self.text(node)[1:-1], State.LITERAL
        elif kind == "ansi_c_string":
            yield self.text(node)[2:-1], State.LITERAL
        elif kind in ("simple_expansion", "expansion"):
            found = self._lookup(node)
            if found is None:
                yield self.text(node), State.DYNAMIC
            else:
                yield found.text, found.state
        elif kind in ("command_substitution", "process_substitution", "arithmetic_expansion"):
            yield self.text(node), State.DYNAMIC
        elif kind == "string":
            yield from self._string(node, depth)
        elif kind in ("concatenation", "command_name", "translated_string", "ERROR"):
            at = node.start_byte
            for child in node.children:
                if child.start_byte > at and kind == "concatenation":
                    yield self.source[at : child.start_byte].decode("utf-8", "replace"), State.LITERAL
                yield from self._parts(child, depth + 1)
                at = child.end_byte
        else:
            text = self.text(node)
            yield (_unescape(text) if "\\" in text else text), State.LITERAL

    def _string(self, node: Node, depth: int) -> Iterator[tuple[str, State]]:
        """A double-quoted string; bytes between its children belong to it."""
        at = node.start_byte + 1
        for child in node.named_children:
            if child.start_byte > at:
                yield self.source[at : child.start_byte].decode("utf-8", "replace"), State.LITERAL
            if child.type == "string_content":
                yield _unescape_quoted(self.text(child)), State.LITERAL
            else:
                yield from self._parts(child, depth + 1)
            at = child.end_byte
        end = node.end_byte - 1
        if end > at:
            yield self.source[at:end].decode("utf-8", "replace"), State.LITERAL

    def _lookup(self, node: Node) -> Variable | None:
        """The variable that an expansion stands for; its default if unset; None if unknown."""
        name = ""
        operator = ""
        default: Node | None = None
        for child in node.children:
            if child.type in ("variable_name", "special_variable_name", "subscript") and not name:
                name = self.text(child).partition("[")[0]
            elif child.type in (
                ":-",
                "-",
                ":=",
                "=",
                ":+",
                "+",
                ":?",
                "?",
                "#",
                "##",
                "%",
                "%%",
                "/",
                "//",
                "^",
                "@",
            ):
                operator = operator or child.type
            elif operator and default is None and child.is_named:
                default = child
        known = self.script.variables.get(name)
        if operator in ("", ":?", "?", "@"):
            return known
        if operator in (":-", "-", ":=", "="):
            if known is not None:
                return known
            words = self.expand(default) if default is not None else []
            dynamic = any(w.state is State.DYNAMIC for w in words)
            state = State.DYNAMIC if dynamic else State.DEFAULT_OF
            tail = self._default_tail(node, default)
            if tail and words:
                text = "".join(w.value for w in words) + tail
                words = [Word(text, text, self.line(node), state)]
            return Variable(words, state, self.line(node))
        return None

    def _default_tail(self, node: Node, default: Node | None) -> str:
        """Text of a default that the grammar cut into several nodes."""
        if default is None:
            return ""
        return self.source[default.end_byte : node.end_byte - 1].decode("utf-8", "replace")


def _split_blanks(text: str) -> list[str]:
    return text.split()


def _unescape(text: str) -> str:
    """Backslash escapes of an unquoted word; an escaped line end vanishes."""
    out = []
    chars = iter(text)
    for char in chars:
        if char == "\\":
            escaped = next(chars, "")
            out.append("" if escaped == "\n" else escaped)
        else:
            out.append(char)
    return "".join(out)


def _unescape_quoted(text: str) -> str:
    """Backslash escapes inside double quotes."""
    for escape, plain in (("\\\n", ""), ('\\"', '"'), ("\\$", "$"), ("\\`", "`"), ("\\\\", "\\")):
        text = text.replace(escape, plain)
    return text
