"""Requirements and lock files → versions of the packages that matter."""

from __future__ import annotations

import configparser
import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from lvllm.audit.facts import Dependency, FileFacts, Site, Word
from lvllm.audit.readers import yamldoc
from lvllm.audit.textpos import text_line

WATCHED = frozenset(
    (
        "vllm",
        "torch",
        "trl",
        "verl",
        "openrlhf",
        "llamafactory",
        "ms-swift",
        "unsloth",
        "fastokens",
        "flashinfer",
        "flashinfer-python",
        "lvllm",
        "lmdeploy",
        "sglang",
    )
)
_WHEEL = re.compile(r"(?:^|/)(l?vllm)-(\d[^-/]*)-[^/]*\.whl")


def read(name: str, text: str, file: str) -> FileFacts:
    """The watched packages of one requirements or lock file (`name` = its base name)."""
    facts = FileFacts()
    lower = name.lower()
    try:
        if lower in ("uv.lock", "poetry.lock"):
            facts.dependencies = _lock(text, file)
        elif lower == "pyproject.toml":
            facts.dependencies = _pyproject(text, file)
        elif lower == "pipfile":
            facts.dependencies = _tables(tomllib.loads(text), ("packages", "dev-packages"), text, file)
        elif lower == "pipfile.lock":
            facts.dependencies = _pipfile_lock(text, file)
        elif lower == "setup.cfg":
            facts.dependencies = _setup_cfg(text, file)
        elif lower.startswith("environment") and lower.endswith((".yml", ".yaml")):
            facts.dependencies = _conda(text, file)
        else:
            facts.dependencies = _requirements(text, file)
    except (ValueError, configparser.Error, RecursionError, AttributeError, TypeError) as error:
        facts.warnings.append(f"{file}: not readable as a dependency file ({type(error).__name__})")
    return facts


def requirement(text: str, site: Site) -> Dependency | None:
    """One requirement line, if it names a watched package."""
    line = text.split(" #")[0].strip().rstrip("\\").strip()
    line = re.split(r"\s--hash", line)[0]
    if not line or line.startswith(("#", "-")):
        return None
    wheel = _WHEEL.search(line)
    if wheel is not None and (" @ " in line or "://" in line or line.endswith(".whl")):
        return Dependency(wheel.group(1), "url", line, site)
    try:
        parsed = Requirement(line)
    except InvalidRequirement:
        match = re.search(r"git\+\S*/(l?vllm)(?:\.git)?(?:@|#|$)", line)
        return Dependency(match.group(1), "url", line, site) if match else None
    name = canonicalize_name(parsed.name)
    if name not in WATCHED:
        return None
    if parsed.url:
        return Dependency(name, "url", parsed.url, site)
    pins = [s.version for s in parsed.specifier if s.operator in ("==", "===") and "*" not in s.version]
    if pins:
        return Dependency(name, "pin", pins[0], site)
    return Dependency(name, "range" if len(parsed.specifier) else "any", str(parsed.specifier), site)


def from_pip_arguments(words: Sequence[Word], file: str) -> list[Dependency]:
    """The packages of a ``pip install`` command."""
    found = (requirement(w.value, Site(file, w.line)) for w in words if not w.value.startswith("-"))
    return [d for d in found if d is not None]


def _requirements(text: str, file: str) -> list[Dependency]:
    found = (requirement(line, Site(file, i)) for i, line in enumerate(text.splitlines(), 1))
    return [d for d in found if d is not None]


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)


def _pyproject(text: str, file: str) -> list[Dependency]:
    data = tomllib.loads(text)
    project = data.get("project", {})
    listed = [project.get("dependencies", []), project.get("optional-dependencies", {})]
    listed.append(data.get("dependency-groups", {}))
    found = [requirement(s, Site(file, text_line(text, s))) for s in _strings(listed)]
    poetry = data.get("tool", {}).get("poetry", {})
    tables = ("dependencies", "dev-dependencies")
    return [d for d in found if d is not None] + _tables(poetry, tables, text, file)


def _tables(data: dict[str, Any], sections: Sequence[str], text: str, file: str) -> list[Dependency]:
    """``name = "version"`` tables (poetry, Pipfile)."""
    found = []
    for section in sections:
        for name, value in data.get(section, {}).items():
            key = canonicalize_name(name)
            if key not in WATCHED:
                continue
            version = value.get("version", "") if isinstance(value, dict) else value
            site = Site(file, text_line(text, name, max(text.find(f"{section}]"), 0)))
            if isinstance(value, dict) and any(k in value for k in ("git", "url", "path", "file")):
                found.append(Dependency(key, "url", str(value), site))
                continue
            found.append(_from_specifier(key, str(version), site))
    return found


def _from_specifier(name: str, version: str, site: Site) -> Dependency:
    version = version.strip()
    if version in ("", "*"):
        return Dependency(name, "any", "", site)
    if version[0].isdigit():
        return Dependency(name, "pin", version, site)
    if version.startswith(("^", "~")) and version[1:2].isdigit():
        return Dependency(name, "range", f">={version[1:]}", site)
    found = requirement(f"{name}{version}", site)
    return found if found is not None else Dependency(name, "any", "", site)


def _lock(text: str, file: str) -> list[Dependency]:
    found = []
    for package in tomllib.loads(text).get("package", []):
        name = canonicalize_name(str(package.get("name", "")))
        if name in WATCHED and package.get("version"):
            at = text.find(f'name = "{package["name"]}"')
            found.append(
                Dependency(
                    name, "lock", str(package["version"]), Site(file, text_line(text, "version", max(at, 0)))
                )
            )
    return found


def _pipfile_lock(text: str, file: str) -> list[Dependency]:
    data = json.loads(text)
    found = []
    for section in ("default", "develop"):
        for name, value in data.get(section, {}).items():
            key = canonicalize_name(name)
            if key in WATCHED and isinstance(value, dict) and value.get("version"):
                version = str(value["version"]).removeprefix("==")
                found.append(Dependency(key, "lock", version, Site(file, text_line(text, f'"{name}"'))))
    return found


def _setup_cfg(text: str, file: str) -> list[Dependency]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.read_string(text)
    lines = [parser.get("options", "install_requires", fallback="")]
    if parser.has_section("options.extras_require"):
        lines += [v for _, v in parser.items("options.extras_require")]
    found = [
        requirement(s, Site(file, text_line(text, s.strip()))) for block in lines for s in block.splitlines()
    ]
    return [d for d in found if d is not None]


def _conda(text: str, file: str) -> list[Dependency]:
    found: list[Dependency] = []
    for doc in yamldoc.load_all(text):
        items = doc.value.get("dependencies") if isinstance(doc.value, dict) else None
        for i, item in enumerate(items if isinstance(items, list) else []):
            if isinstance(item, str):
                spec = re.sub(r"(?<![=<>!~])=(?!=)", "==", item, count=1).rpartition("::")[2]
                one = requirement(spec, Site(file, doc.line("dependencies", i)))
                found += [one] if one is not None else []
            elif isinstance(item, dict) and isinstance(item.get("pip"), list):
                for j, line in enumerate(item["pip"]):
                    one = requirement(str(line), Site(file, doc.line("dependencies", i, "pip", j)))
                    found += [one] if one is not None else []
    return found
