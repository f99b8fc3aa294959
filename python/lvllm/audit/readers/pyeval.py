"""Evaluation of Python expressions without running them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lvllm.audit.facts import State, Value
from lvllm.audit.values import is_plain

UNKNOWN = "<unknown>"
"""Stands in a dictionary or list for a part whose value is not known."""
MAX_DEPTH = 30
MAX_LENGTH = 10_000


@dataclass(frozen=True, slots=True)
class Result:
    """A value and how it was obtained. Dynamic results carry None."""

    value: Value
    state: State = State.LITERAL
    default_of: str = ""


DYNAMIC = Result(None, State.DYNAMIC)


@dataclass(slots=True)
class Scope:
    """What a module says about its names."""

    imports: dict[str, str] = field(default_factory=dict)
    """Local name → dotted origin (``L`` → ``vllm.LLM``)."""
    assigned: dict[str, list[ast.expr]] = field(default_factory=dict)
    """Name → expressions assigned to it, module and functions together."""
    arguments: dict[str, ast.expr | None] = field(default_factory=dict)
    """argparse destination → default expression."""
    unstable: set[str] = field(default_factory=set)
    """Names that are loop targets, function parameters or augmented."""

    def dotted(self, node: ast.expr, depth: int = 0) -> str:
        """The resolved dotted name of an expression, '' if it has none."""
        if depth > MAX_DEPTH:
            return ""
        if isinstance(node, ast.Name):
            if node.id in self.imports:
                return self.imports[node.id]
            values = self.assigned.get(node.id, [])
            if len(values) == 1 and isinstance(values[0], ast.Attribute):
                inner = self.dotted(values[0], depth + 1)
                return inner or node.id
            return node.id
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value, depth + 1)
            return f"{base}.{node.attr}" if base else ""
        return ""


class Evaluator:
    """Evaluates expressions in a scope."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def value(self, node: ast.expr | None, depth: int = 0) -> Result:
        """The value of `node` as far as the module itself tells."""
        if node is None or depth > MAX_DEPTH:
            return DYNAMIC
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            return DYNAMIC
        result: Result = method(node, depth + 1)
        return result

    def _constant(self, node: ast.Constant, _depth: int) -> Result:
        return Result(node.value) if is_plain(node.value) else DYNAMIC

    def _name(self, node: ast.Name, depth: int) -> Result:
        values = self.scope.assigned.get(node.id, [])
        if node.id in self.scope.unstable or len(values) != 1:
            return DYNAMIC
        return self.value(values[0], depth)

    def _attribute(self, node: ast.Attribute, depth: int) -> Result:
        if isinstance(node.value, ast.Name) and node.value.id in (
            "args",
            "opt",
            "opts",
            "cli_args",
            "parsed",
        ):
            if node.attr not in self.scope.arguments:
                return DYNAMIC
            default = self.scope.arguments[node.attr]
            if default is None:
                return DYNAMIC
            found = self.value(default, depth)
            if found.state is State.DYNAMIC or found.value is None:
                return DYNAMIC
            return Result(found.value, State.DEFAULT_OF, f"--{node.attr.replace('_', '-')}")
        dotted = self.scope.dotted(node)
        if dotted.startswith("torch.") and dotted.rpartition(".")[2] in (
            "float16",
            "bfloat16",
            "float32",
            "half",
        ):
            return Result(dotted.rpartition(".")[2])
        return DYNAMIC

    def _list(self, node: ast.List, depth: int) -> Result:
        return self._sequence(node.elts, depth)

    def _tuple(self, node: ast.Tuple, depth: int) -> Result:
        return self._sequence(node.elts, depth)

    def _set(self, node: ast.Set, depth: int) -> Result:
        return self._sequence(node.elts, depth)

    def _sequence(self, items: list[ast.expr], depth: int) -> Result:
        if len(items) > MAX_LENGTH:
            return DYNAMIC
        found = [self.value(e, depth) for e in items]
        return _joined([_part(r) for r in found], found)

    def _dict(self, node: ast.Dict, depth: int) -> Result:
        if len(node.keys) > MAX_LENGTH:
            return DYNAMIC
        result: dict[str, Value] = {}
        found = []
        for key, item in zip(node.keys, node.values, strict=True):
            inner = self.value(item, depth)
            found.append(inner)
            if key is None:
                if not isinstance(inner.value, dict):
                    return DYNAMIC
                result.update(inner.value)
                continue
            name = self.value(key, depth)
            if not isinstance(name.value, str):
                return DYNAMIC
            result[name.value] = _part(inner)
        return _joined(result, found)

    def _joinedstr(self, node: ast.JoinedStr, depth: int) -> Result:
        found = []
        for part in node.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            found.append(self.value(inner, depth))
        if any(r.state is State.DYNAMIC for r in found):
            return DYNAMIC
        return _joined("".join(str(r.value) for r in found), found)

    def _unaryop(self, node: ast.UnaryOp, depth: int) -> Result:
        inner = self.value(node.operand, depth)
        if inner.state is State.DYNAMIC:
            return DYNAMIC
        if isinstance(node.op, ast.Not):
            return Result(not inner.value, inner.state, inner.default_of)
        if isinstance(inner.value, int | float) and not isinstance(inner.value, bool):
            if isinstance(node.op, ast.USub):
                return Result(-inner.value, inner.state, inner.default_of)
            return inner if isinstance(node.op, ast.UAdd) else DYNAMIC
        return DYNAMIC

    def _binop(self, node: ast.BinOp, depth: int) -> Result:
        left, right = self.value(node.left, depth), self.value(node.right, depth)
        if State.DYNAMIC in (left.state, right.state):
            return DYNAMIC
        a, b = left.value, right.value
        both_text = isinstance(a, str) and isinstance(b, str)
        if isinstance(node.op, ast.Add) and both_text and len(a) + len(b) < MAX_LENGTH:
            return _joined(a + b, [left, right])
        numeric = all(
            isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e15 for v in (a, b)
        )
        if not numeric:
            return DYNAMIC
        try:
            value = _arithmetic(node.op, a, b)
        except (ZeroDivisionError, OverflowError, ValueError):
            return DYNAMIC
        return DYNAMIC if value is None else _joined(value, [left, right])

    def _boolop(self, node: ast.BoolOp, depth: int) -> Result:
        """``os.environ.get("X") or 5``: the last operand is the default."""
        last = self.value(node.values[-1], depth)
        if isinstance(node.op, ast.Or) and last.state is not State.DYNAMIC:
            return Result(last.value, State.DEFAULT_OF, last.default_of or "or")
        return DYNAMIC

    def _call(self, node: ast.Call, depth: int) -> Result:
        name = self.scope.dotted(node.func)
        if name in ("os.environ.get", "os.getenv") and node.args:
            variable = self.value(node.args[0], depth)
            default = self.value(node.args[1], depth) if len(node.args) > 1 else DYNAMIC
            if default.state is State.DYNAMIC or not isinstance(variable.value, str):
                return DYNAMIC
            return Result(default.value, State.DEFAULT_OF, variable.value)
        if name in ("int", "float", "str", "bool") and len(node.args) == 1 and not node.keywords:
            return self._converted(name, self.value(node.args[0], depth))
        if name == "dict" and not node.args:
            found = {k.arg: self.value(k.value, depth) for k in node.keywords if k.arg}
            if len(found) != len(node.keywords):
                return DYNAMIC
            return _joined({k: _part(r) for k, r in found.items()}, list(found.values()))
        if name == "json.dumps" and node.args:
            return self.value(node.args[0], depth)
        return DYNAMIC

    def _converted(self, name: str, inner: Result) -> Result:
        if inner.state is State.DYNAMIC:
            return DYNAMIC
        try:
            value: Value
            if name == "int":
                value = int(inner.value)
            elif name == "float":
                value = float(inner.value)
            elif name == "bool":
                value = bool(inner.value)
            else:
                value = str(inner.value)
        except (TypeError, ValueError, OverflowError):
            return DYNAMIC
        return Result(value, inner.state, inner.default_of)


def _arithmetic(op: ast.operator, a: float, b: float) -> float | None:
    if isinstance(op, ast.Add):
        return a + b
    if isinstance(op, ast.Sub):
        return a - b
    if isinstance(op, ast.Mult):
        return a * b
    if isinstance(op, ast.Div):
        return a / b
    if isinstance(op, ast.FloorDiv):
        return a // b
    if isinstance(op, ast.Mod):
        return a % b
    if isinstance(op, ast.Pow) and abs(b) <= 64 and abs(a) <= 1024:
        return float(a**b) if isinstance(a, float) or b < 0 else int(a**b)
    return None


def _part(result: Result) -> Value:
    return UNKNOWN if result.state is State.DYNAMIC else result.value


def _joined(value: Value, parts: list[Result]) -> Result:
    """A value made of parts: as good as the worst of them."""
    default_of = next((r.default_of for r in parts if r.default_of), "")
    if any(r.state is State.DYNAMIC for r in parts):
        # A container with one unknown part is still known for the others.
        if isinstance(value, dict | list):
            return Result(value, State.LITERAL, default_of)
        return DYNAMIC
    if any(r.state is State.DEFAULT_OF for r in parts):
        return Result(value, State.DEFAULT_OF, default_of)
    return Result(value)


def build_scope(nodes: Iterable[ast.AST]) -> Scope:
    """Imports, assignments and argparse defaults of a module, out of all its nodes."""
    scope = Scope()
    for node in nodes:
        handler = _SCOPE.get(type(node))
        if handler is not None:
            handler(scope, node)
    return scope


def _import(scope: Scope, node: ast.Import) -> None:
    for alias in node.names:
        root = alias.name.partition(".")[0]
        scope.imports[alias.asname or root] = alias.name if alias.asname else root


def _import_from(scope: Scope, node: ast.ImportFrom) -> None:
    for alias in node.names:
        if node.module:
            scope.imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"


def _assignment(scope: Scope, node: ast.Assign) -> None:
    for target in node.targets:
        _assign(scope, target, node.value)


def _annotated(scope: Scope, node: ast.AnnAssign) -> None:
    if node.value is not None:
        _assign(scope, node.target, node.value)


def _augmented(scope: Scope, node: ast.AugAssign) -> None:
    if isinstance(node.target, ast.Name):
        scope.unstable.add(node.target.id)


def _loop(scope: Scope, node: ast.For | ast.AsyncFor | ast.comprehension) -> None:
    for inner in ast.walk(node.target):
        if isinstance(inner, ast.Name):
            scope.unstable.add(inner.id)


def _function(scope: Scope, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
    _parameters(scope, node.args)


def _assign(scope: Scope, target: ast.expr, value: ast.expr) -> None:
    if isinstance(target, ast.Name):
        scope.assigned.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple | ast.List):
        for inner in ast.walk(target):
            if isinstance(inner, ast.Name):
                scope.unstable.add(inner.id)


def _parameters(scope: Scope, arguments: ast.arguments) -> None:
    """A parameter with a default and no other assignment stands for its default."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: Mapping[str, ast.expr | None] = {
        **dict(
            zip(
                [a.arg for a in plain[len(plain) - len(arguments.defaults) :]],
                arguments.defaults,
                strict=True,
            )
        ),
        **dict(zip([a.arg for a in arguments.kwonlyargs], arguments.kw_defaults, strict=True)),
    }
    for argument in (*plain, *arguments.kwonlyargs):
        default = defaults.get(argument.arg)
        if default is None or argument.arg in scope.assigned:
            scope.unstable.add(argument.arg)
        else:
            fallback = ast.BoolOp(ast.Or(), [ast.Name(argument.arg, ast.Load()), default])
            scope.assigned.setdefault(argument.arg, []).append(fallback)


def _argument(scope: Scope, call: ast.Call) -> None:
    """``parser.add_argument("--a-b", default=…)``."""
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument" and call.args):
        return
    flags = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    long = [f for f in flags if f.startswith("--")] or flags
    keywords = {k.arg: k.value for k in call.keywords if k.arg}
    if not long:
        return
    name = long[0].lstrip("-").replace("-", "_")
    dest = keywords.get("dest")
    if isinstance(dest, ast.Constant) and isinstance(dest.value, str):
        name = dest.value
    default = keywords.get("default")
    if default is None:
        action = keywords.get("action")
        if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
            default = ast.Constant(action.value == "store_false")
    scope.arguments[name] = default


_SCOPE: dict[type[ast.AST], Callable[[Scope, Any], None]] = {
    ast.Import: _import,
    ast.ImportFrom: _import_from,
    ast.Assign: _assignment,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented,
    ast.For: _loop,
    ast.AsyncFor: _loop,
    ast.comprehension: _loop,
    ast.FunctionDef: _function,
    ast.AsyncFunctionDef: _function,
    ast.Lambda: _function,
    ast.Call: _argument,
}
