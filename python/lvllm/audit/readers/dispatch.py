"""Which reader a file gets, by its name; what is not relevant is not parsed."""

from __future__ import annotations

import re

from lvllm.audit import names
from lvllm.audit.facts import Fact, FileFacts
from lvllm.audit.readers import (
    configfile,
    deps,
    dockerfile,
    launch,
    markup,
    notebook,
    python,
    systemd,
)

_SHELL = (".sh", ".bash", ".zsh", ".slurm", ".sbatch")
_DEPENDENCY_NAMES = ("pyproject.toml", "setup.cfg", "uv.lock", "poetry.lock", "pipfile", "pipfile.lock")
_PYTHON_MARKS = (b"vllm", b"update_weights", b"wake_up", b"load_lora_adapter", b"fast_inference", b"sglang")
_ENV_NAME = re.compile(r"^(\.env.*|.*\.env)$")


def kind(base: str) -> str | None:
    """The kind of a file by its base name; None = not scanned."""
    lower = base.lower()
    if lower.startswith("dockerfile") or lower.endswith(".dockerfile") or lower == "containerfile":
        return "dockerfile"
    if lower in _DEPENDENCY_NAMES:
        return "dependency"
    if lower.endswith(".txt"):
        return (
            "dependency"
            if re.match(r"^(requirements|constraints).*\.txt$|.*requirements.*\.txt$", lower)
            else None
        )
    if lower.endswith(_SHELL):
        return "shell"
    if lower in ("makefile", "gnumakefile") or lower.endswith(".mk"):
        return "makefile"
    if lower in ("justfile", "procfile"):
        return lower
    for suffix, name in (
        (".ps1", "powershell"),
        (".service", "systemd"),
        (".py", "python"),
        (".ipynb", "notebook"),
        (".md", "markup"),
        (".rst", "markup"),
        (".yaml", "yaml"),
        (".yml", "yaml"),
        (".toml", "toml"),
        (".json", "json"),
    ):
        if lower.endswith(suffix):
            return name
    return "env" if _ENV_NAME.match(lower) else None


def relevant(file_kind: str, data: bytes) -> bool:
    """A cheap test that keeps the parsers away from files with nothing to say."""
    if b"\0" in data[:8192]:
        return False
    if file_kind in ("dependency", "env", "systemd", "dockerfile"):
        return True
    lower = data.lower()
    if file_kind == "python":
        return any(mark in lower for mark in _PYTHON_MARKS)
    if b"vllm" in lower or b"lk_" in lower or b"sglang" in lower:
        return True
    if file_kind in ("yaml", "toml", "json"):
        hits = sum(name.encode() in lower.replace(b"-", b"_") for name in sorted(names.distinctive()))
        service = file_kind == "yaml" and (b"kind:" in data or b"services:" in data)
        return hits >= 2 or service
    if file_kind in ("shell", "makefile", "justfile", "powershell"):
        return any(m in lower for m in (b".py", b"verl", b"openrlhf", b"swift ", b"llamafactory", b"export "))
    return False


def read(file_kind: str, text: str, file: str, env_file: dict[str, Fact]) -> FileFacts:
    """The facts of one file. `env_file` are the variables of ``.env`` beside it."""
    base = file.rsplit("/", 1)[-1]
    context = launch.Context(file)
    if file_kind == "python":
        return python.read(text, file)
    if file_kind == "notebook":
        return notebook.read(text, file)
    if file_kind == "markup":
        return markup.read(text, file)
    if file_kind == "yaml":
        facts = configfile.read_yaml(text, file, base.lower(), env_file)
        if base.lower().startswith("environment"):
            facts.extend(deps.read(base, text, file))
        return facts
    if file_kind == "toml":
        return configfile.read_toml(text, file)
    if file_kind == "json":
        return configfile.read_json(text, file)
    if file_kind == "dependency":
        return deps.read(base, text, file)
    if file_kind == "dockerfile":
        return dockerfile.read(text, file)
    if file_kind == "systemd":
        return systemd.read(text, file)
    if file_kind == "env":
        facts = FileFacts()
        facts.env = env_variables(text, file)
        return facts
    return launch.from_script(as_bash(file_kind, text), context)


def env_variables(text: str, file: str) -> dict[str, Fact]:
    """``NAME=value`` lines of a ``.env`` file."""
    found = launch.from_script(text, launch.Context(file, ".env")).env
    return {k: Fact(k, f.value, f.state, f.site, ".env", k) for k, f in found.items()}


def as_bash(file_kind: str, text: str) -> str:
    """Makefiles, justfiles, Procfiles and PowerShell as shell text with the same line numbers."""
    if file_kind == "shell":
        return text
    lines = text.split("\n")
    convert = {"makefile": _make, "justfile": _just, "procfile": _proc, "powershell": _power}[file_kind]
    return "\n".join(convert(line) for line in lines)


def _make(line: str) -> str:
    if line.startswith("\t"):
        recipe = re.sub(r"^\s*(?:[@+]|-(?!-))*\s*", "", line)
        recipe = recipe.replace("$$", "\0")
        return re.sub(r"\$\((\w+)\)", r"${\1}", recipe).replace("\0", "$")
    match = re.match(r"^(?:export\s+)?([A-Za-z_]\w*)\s*[:?+]?=\s*(.*)$", line)
    if match:
        value = match.group(2).split(" #")[0].strip()
        keyword = "export " if line.startswith("export") else ""
        tail = "\\" if value.endswith("\\") else ""
        body = value.rstrip("\\").strip()
        if "$(" in body or tail:
            return ""
        return f"{keyword}{match.group(1)}='{body}'" if "'" not in body else ""
    # A continued recipe or variable keeps its words; targets and directives say nothing.
    return line.strip() if line.startswith(" ") and not line.strip().endswith(":") else ""


def _just(line: str) -> str:
    if line[:1] in " \t":
        return re.sub(r"\{\{\s*(\w+)\s*\}\}", r"${\1}", line.strip().lstrip("@-"))
    match = re.match(r"^(?:export\s+)?(\w+)\s*:=\s*(['\"].*['\"])\s*$", line)
    return f"{match.group(1)}={match.group(2)}" if match else ""


def _proc(line: str) -> str:
    return line.partition(":")[2].strip() if re.match(r"^[\w-]+:", line) else ""


def _power(line: str) -> str:
    stripped = line.rstrip()
    tail = ""
    if stripped.endswith("`"):
        stripped, tail = stripped[:-1], "\\"
    stripped = re.sub(r"^\s*\$env:(\w+)\s*=\s*", r"export \1=", stripped, flags=re.I)
    stripped = re.sub(r"^\s*\$(\w+)\s*=\s*", r"\1=", stripped)
    stripped = re.sub(r"\$env:(\w+)", r"$\1", stripped, flags=re.I)
    stripped = re.sub(r"^\s*&\s+", "", stripped)
    return stripped + tail
