"""Rebuild the names table of `lvllm audit` from a vLLM tree: parsed, never imported.

    python tools/make_audit_names.py                       # the vLLM installed beside this Python
    python tools/make_audit_names.py path/to/site-packages/vllm
    python tools/make_audit_names.py path/to/vllm-checkout --output names-0.34.0.json

Writes engine fields with their literal defaults, command-line options and environment variables to
python/lvllm/audit/data/names-VERSION.json and prints what changed against the table in use.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "python" / "lvllm" / "audit" / "data"
NOTE = "default '?' = not a literal (computed or nested); null = unset, decided at start"
COMPUTED = "?"


def find_package(source: str | None) -> Path:
    """The folder of the vllm package: given, below a checkout, or installed (not imported)."""
    if source is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("vllm is not installed here; give the path of its package or of a checkout")
        return Path(spec.submodule_search_locations[0])
    for candidate in (Path(source), Path(source) / "vllm"):
        if (candidate / "engine" / "arg_utils.py").is_file():
            return candidate
    raise SystemExit(f"{source}: no engine/arg_utils.py here or in its vllm folder")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def version_of(package: Path) -> str:
    """The release from _version.py, else from the installed metadata beside the package."""
    version_file = package / "_version.py"
    if version_file.is_file():
        match = re.search(r"""^(?:__version__ = )?(?:version = |__version__ = )['"]([^'"]+)""",
                          version_file.read_text("utf-8"), re.M)  # fmt: skip
        if match:
            return match.group(1).partition("+")[0]
    for info in package.parent.glob("vllm-*.dist-info"):
        return info.name.removeprefix("vllm-").removesuffix(".dist-info").partition("+")[0]
    raise SystemExit(f"{package}: version unknown; give --version")


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in tree.body if isinstance(node, ast.ClassDef))


def annotated(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    """Dataclass fields: (name, default expression)."""
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        if "ClassVar" not in ast.unparse(item.annotation):
            yield item.target.id, item.value


class Defaults:
    """Literal defaults of the configuration classes, by class and field."""

    def __init__(self, package: Path) -> None:
        self.found: dict[str, dict[str, ast.expr | None]] = {}
        for path in sorted((package / "config").rglob("*.py")):
            for node in classes(parse(path)):
                self.found[node.name] = dict(annotated(node))

    def value(self, node: ast.expr | None, depth: int = 0) -> Any:
        """The literal that an expression stands for, else `COMPUTED`."""
        if node is None or depth > 4:
            return COMPUTED
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError):
            pass
        else:
            return value if value is None or isinstance(value, bool | int | float | str) else COMPUTED
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            fields = self.found.get(node.value.id, {})
            return self.value(fields.get(node.attr), depth + 1)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("field", "Field"):
            for keyword in node.keywords:
                if keyword.arg == "default":
                    return self.value(keyword.value, depth + 1)
            if node.args and not (isinstance(node.args[0], ast.Constant) and node.args[0].value is Ellipsis):
                return self.value(node.args[0], depth + 1)
        return COMPUTED


def options(tree: ast.Module) -> set[str]:
    """Every ``add_argument("--name")``."""
    found = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and str(argument.value).startswith("--"):
                    found.add(str(argument.value))
    return found


def environment(tree: ast.Module) -> list[str]:
    """Keys of ``environment_variables``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Dict):
            continue
        if isinstance(node.target, ast.Name) and node.target.id == "environment_variables":
            keys = (k.value for k in node.value.keys if isinstance(k, ast.Constant))
            return sorted(str(k) for k in keys if str(k).startswith("VLLM_"))
    raise SystemExit("envs.py has no environment_variables table any more: adapt this script")


def frontend(package: Path) -> set[str]:
    """Options of the server: fields of its argument classes and what is added by hand."""
    found: set[str] = set()
    for path in sorted(package.glob("entrypoints/**/cli_args.py")):
        tree = parse(path)
        for node in classes(tree):
            if node.name.endswith("FrontendArgs"):
                found |= {f"--{name.replace('_', '-')}" for name, _ in annotated(node)}
        found |= options(tree)
    if not found:
        raise SystemExit("no entrypoints/**/cli_args.py with FrontendArgs: adapt this script")
    return found


def table(package: Path, version: str) -> dict[str, Any]:
    """The whole table."""
    arguments = parse(package / "engine" / "arg_utils.py")
    defaults = Defaults(package)
    fields: dict[str, Any] = {}
    for node in classes(arguments):
        if node.name in ("EngineArgs", "AsyncEngineArgs"):
            public = ((n, v) for n, v in annotated(node) if not n.startswith("_"))
            fields.update({name: defaults.value(value) for name, value in public})
    if len(fields) < 50:
        raise SystemExit("EngineArgs has fewer than 50 fields: its layout changed, adapt this script")
    return {
        "engine_fields": dict(sorted(fields.items())),
        "engine_options": sorted(options(arguments)),
        "environment": environment(parse(package / "envs.py")),
        "note": NOTE,
        "serve_options": sorted(frontend(package)),
        "vllm": version,
    }


def difference(old: Iterable[str], new: Iterable[str]) -> str:
    gone, added = sorted(set(old) - set(new)), sorted(set(new) - set(old))
    return f"added {added}; gone {gone}" if gone or added else "same names"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", nargs="?", help="vllm package folder or checkout (default: the installed one)"
    )
    parser.add_argument("--version", help="release, if the tree does not say")
    parser.add_argument("--output", type=Path, help="file to write (default: the package's data folder)")
    arguments = parser.parse_args()
    package = find_package(arguments.source)
    made = table(package, arguments.version or version_of(package))
    target = arguments.output or DATA / f"names-{made['vllm']}.json"
    current = sorted(DATA.glob("names-*.json"))
    target.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", "utf-8")
    print(f"{target}: {len(made['engine_fields'])} fields, {len(made['engine_options'])} + "
          f"{len(made['serve_options'])} options, {len(made['environment'])} variables")  # fmt: skip
    if current:
        old = json.loads(current[-1].read_text("utf-8"))
        print(f"against {old['vllm']}:")
        for key in ("engine_fields", "engine_options", "serve_options", "environment"):
            print(f"  {key}: {difference(old[key], made[key])}")
        changed = [
            f"{k} {old['engine_fields'][k]!r} -> {v!r}"
            for k, v in made["engine_fields"].items()
            if k in old["engine_fields"] and old["engine_fields"][k] != v
        ]
        print(f"  defaults: {changed or 'same'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
