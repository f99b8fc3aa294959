"""Python modules, read as syntax trees; never imported, never run."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from typing import cast

from lvllm.audit.facts import Fact, FileFacts, Site, State, Unit, Word
from lvllm.audit.readers import launch, pycalls
from lvllm.audit.readers.pyeval import Evaluator, Scope, build_scope

_HTTP_APPS = ("fastapi.FastAPI", "flask.Flask", "starlette.applications.Starlette", "aiohttp.web.Application",
              "sanic.Sanic", "litserve.LitServer", "ray.serve.deployment", "bentoml.service")  # fmt: skip
_RUNNERS = ("subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_call",
            "subprocess.check_output", "os.system", "os.popen")  # fmt: skip
_ENGINES = ("generate", "chat", "encode", "embed", "score", "classify", "beam_search", "generate_async")
_CONTROL = (
    "wake_up",
    "collective_rpc",
    "update_weights",
    "pause_generation",
    "resume_generation",
    "reset_prefix_cache",
    "reload_weights",
    "start_weight_update",
    "finish_weight_update",
)
_ENDPOINTS = (
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/pause",
    "/resume",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
_CUDA_INIT = (
    "torch.cuda.init",
    "torch.cuda.set_device",
    "torch.cuda.current_device",
    "torch.cuda.mem_get_info",
    "torch.cuda.get_device_properties",
    "torch.cuda.synchronize",
)
MAX_NODES = 400_000


def read(text: str, file: str, *, first_line: int = 1, documentation: bool = False) -> FileFacts:
    """Units and facts of one module. A syntax error is one warning."""
    facts = FileFacts()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
        nodes = list(ast.walk(tree))
        if len(nodes) > MAX_NODES:
            raise ValueError("too large")
        _Module(tree, nodes, file, facts, first_line - 1, documentation).read()
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" at line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        if not documentation:
            facts.warnings.append(f"{file}: not readable as Python 3{line}")
        return FileFacts(warnings=facts.warnings)
    return facts


class _Module:
    def __init__(
        self,
        tree: ast.Module,
        nodes: list[ast.AST],
        file: str,
        facts: FileFacts,
        offset: int,
        documentation: bool,
    ) -> None:
        self.tree, self.nodes, self.file, self.facts = tree, nodes, file, facts
        self.offset, self.documentation = offset, documentation
        self.scope: Scope = build_scope(nodes)
        self.evaluator = Evaluator(self.scope)
        self.env: list[Fact] = []
        self.calls: list[Fact] = []
        self.sampling: list[Fact] = []
        self.units: list[tuple[Unit, ast.Call]] = []
        self.guarded = _guarded_lines(tree)
        self.cuda_lines: list[int] = []
        self.serves = False
        self.repetitive: Site | None = None

    def site(self, node: ast.AST) -> Site:
        return Site(self.file, int(getattr(node, "lineno", 1)) + self.offset)

    def read(self) -> None:
        for node in self.nodes:
            kind = type(node)
            if kind is ast.Call:
                self._call(cast(ast.Call, node))
            elif kind is ast.Assign:
                self._environ(cast(ast.Assign, node))
            elif kind is ast.Constant:
                self._text(cast(ast.Constant, node))
        self._finish()

    def fact(self, name: str, node: ast.AST, value: object, state: State, written: str = "") -> Fact:
        return Fact(name, value, state, self.site(node), "python", written or name, self.documentation)

    def _call(self, node: ast.Call) -> None:
        name = self.scope.dotted(node.func)
        tail = name.rpartition(".")[2] or (node.func.attr if isinstance(node.func, ast.Attribute) else "")
        if name in _HTTP_APPS or name in ("uvicorn.run",):
            self.serves = True
        if name in _RUNNERS or (name.startswith("os.exec") and node.args):
            self._subprocess(node, name)
            return
        if name in ("os.environ.setdefault", "os.putenv") or tail == "setenv":
            self._setenv(node)
            return
        if name in _CUDA_INIT or _moves_to_cuda(node, tail):
            self.cuda_lines.append(self.site(node).line)
        if tail in ("LoraConfig", "get_peft_model"):
            rank = self._keywords(node).get("r")
            self.calls.append(self.fact("lora_training", node, rank, State.LITERAL, tail))
        unit = pycalls.unit(self, node, name)
        if unit is not None:
            self.units.append((unit, node))
            return
        if tail in ("SamplingParams", "GuidedDecodingParams") and name.startswith("vllm"):
            self._sampling(node, tail)
        else:
            self._behaviour(node, name, tail)

    def _sampling(self, node: ast.Call, tail: str) -> None:
        if tail == "GuidedDecodingParams":
            self.sampling.append(
                self.fact("guided_decoding", node, True, State.LITERAL, "GuidedDecodingParams")
            )
            return
        for keyword in node.keywords:
            if keyword.arg:
                found = self.evaluator.value(keyword.value)
                self.sampling.append(
                    self.fact(keyword.arg, keyword.value, found.value, found.state, keyword.arg)
                )

    def _behaviour(self, node: ast.Call, name: str, tail: str) -> None:
        if not isinstance(node.func, ast.Attribute):
            return
        receiver = ast.unparse(node.func.value)[:200].lower() if len(name) < 500 else ""
        engine = any(w in receiver for w in ("llm", "engine", "client", "rollout"))
        if tail in _CONTROL or (tail in _ENGINES and engine):
            self.calls.append(self.fact(tail, node, self._keywords(node), State.LITERAL))
        elif tail == "sleep" and engine and not name.startswith(("time.", "asyncio.")):
            keywords = self._keywords(node)
            if node.args:
                keywords.setdefault("level", self.evaluator.value(node.args[0]).value)
            self.calls.append(self.fact("sleep", node, keywords, State.LITERAL))
        elif (tail == "step" and "optim" in receiver) or (tail == "backward"):
            self.calls.append(self.fact("optimizer_step", node, None, State.LITERAL))
        elif tail in ("save_pretrained", "save_checkpoint", "save_model"):
            self.calls.append(self.fact("save_checkpoint", node, None, State.LITERAL))
        elif tail in ("add_lora", "load_lora_adapter") and engine:
            self.calls.append(self.fact("load_lora", node, None, State.LITERAL))
        elif name.rpartition(".")[2] == "LoRARequest":
            self.calls.append(self.fact("lora_request", node, None, State.LITERAL))

    def _keywords(self, node: ast.Call) -> dict[str, object]:
        return {k.arg: self.evaluator.value(k.value).value for k in node.keywords if k.arg}

    def _text(self, node: ast.Constant) -> None:
        text = node.value
        if not isinstance(text, str) or len(text) > 4000:
            return
        for endpoint in _ENDPOINTS if "/" in text else ():
            if text.endswith(endpoint) or f"{endpoint}?" in text:
                self.calls.append(self.fact(f"http:{endpoint}", node, None, State.LITERAL))
        lower = text.lower()
        if any(
            w in lower for w in ("summarize the", "summarise the", "rewrite the following", "extract the")
        ):
            self.repetitive = self.repetitive or self.site(node)

    def _environ(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Subscript) and self.scope.dotted(target.value) == "os.environ":
                key = self.evaluator.value(target.slice)
                if isinstance(key.value, str):
                    found = self.evaluator.value(node.value)
                    self.env.append(self.fact(key.value, node, found.value, found.state))

    def _setenv(self, node: ast.Call) -> None:
        if len(node.args) < 2:
            return
        key, found = self.evaluator.value(node.args[0]), self.evaluator.value(node.args[1])
        if isinstance(key.value, str):
            self.env.append(self.fact(key.value, node, found.value, found.state))

    def _subprocess(self, node: ast.Call, name: str) -> None:
        """A launch line inside Python: a list of words or a shell string."""
        if not node.args:
            return
        context = launch.Context(self.file, "python", self.documentation)
        first = node.args[0]
        if name.startswith("os.exec"):
            first = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], ast.List) else first
        items = self._list_items(first)
        found: list[Unit] = []
        if items:
            words = [self._word(item) for item in items]
            unit = launch.recognise(words, context)
            found = [unit] if unit is not None else []
        elif not items:
            text = self.evaluator.value(first)
            if isinstance(text.value, str) and "vllm" in text.value:
                found = launch.from_script(text.value, context, self.site(first).line).units
        for unit in found:
            self.units.append((unit, node))

    def _list_items(self, node: ast.expr, depth: int = 0) -> list[ast.expr]:
        if isinstance(node, ast.List):
            return node.elts
        if isinstance(node, ast.Name) and depth == 0:
            values = self.scope.assigned.get(node.id, [])
            return self._list_items(values[0], 1) if values else []
        return []

    def _word(self, node: ast.expr) -> Word:
        found = self.evaluator.value(node)
        text = "" if found.value is None else str(found.value)
        if found.state is State.DYNAMIC:
            text = "$dynamic"
        return Word(text, text, self.site(node).line, found.state)

    def _finish(self) -> None:
        for unit, call in self.units:
            line = int(call.lineno) + self.offset
            for fact in self.env:
                if fact.site.line <= line or len(self.units) == 1:
                    unit.env.setdefault(fact.name, fact)
            unit.documentation = self.documentation
            unit.sampling = list(self.sampling)
            unit.calls = sorted(self.calls, key=lambda f: (f.site.line, f.name))
            if unit.launcher in ("LLM", "engine"):
                unit.serves = unit.serves or (unit.launcher == "engine" and self.serves)
                unit.main_guard = self._guard(call)
                if self.repetitive is not None:
                    unit.hints["repetitive"] = self.repetitive
                before = [c for c in self.cuda_lines if c < line]
                if before:
                    unit.hints["cuda_before"] = Site(self.file, before[0])
            self.facts.units.append(unit)
        if self.serves:
            self.facts.hints.setdefault("http_app", Site(self.file, 1))
        self.facts.calls += self.calls
        for fact in self.env:
            self.facts.env[fact.name] = fact
        if not self.units:
            self.facts.calls += self.sampling if self.documentation else []

    def _guard(self, call: ast.Call) -> bool | None:
        """True if the call runs under a main guard, False if at import, None if unknown."""
        line = int(call.lineno)
        if any(a <= line <= b for a, b in self.guarded):
            return True
        functions = list(_enclosing_functions(self.nodes, line))
        if not functions:
            return False
        if self.guarded:
            return True
        called = {n.value.func.id for n in self.tree.body
                  if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)
                  and isinstance(n.value.func, ast.Name)}  # fmt: skip
        return False if any(f in called for f in functions) else None


def _moves_to_cuda(node: ast.Call, tail: str) -> bool:
    """``x.cuda()`` or ``x.to("cuda…")``."""
    if tail == "cuda":
        return isinstance(node.func, ast.Attribute) and not node.args
    first = node.args[0] if tail == "to" and node.args else None
    return isinstance(first, ast.Constant) and str(first.value).startswith("cuda")


def _guarded_lines(tree: ast.Module) -> list[tuple[int, int]]:
    """Line ranges under ``if __name__ == "__main__"``."""
    ranges = []
    for node in tree.body:
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)[:200]:
            ranges.append((int(node.lineno), int(node.end_lineno or node.lineno)))
    return ranges


def _enclosing_functions(nodes: list[ast.AST], line: int) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef) and (
            node.lineno <= line <= int(node.end_lineno or node.lineno)
        ):
            yield getattr(node, "name", "")
