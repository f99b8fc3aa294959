"""Which release of vLLM and of the frameworks a unit uses."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from lvllm.audit import names
from lvllm.audit.facts import Dependency, Site, Unit

_TAG = re.compile(r"^v?(\d+\.\d+(?:\.\d+)?(?:\.?(?:post|rc|dev)\d*)?)")
_KINDS = ("lock", "pin", "range", "any", "url")


@dataclass(frozen=True, slots=True)
class Declared:
    """A declared version. `exact` says whether it is more than a lower bound; `text` '' = unknown."""

    text: str = ""
    source: str = "unknown"
    site: Site | None = None
    exact: bool = False

    @property
    def known(self) -> bool:
        return bool(self.text)

    def at_least(self, release: str) -> bool:
        """True if this version, or the reference version when unknown, is `release` or later."""
        return parse(self.text or names.reference()) >= parse(release)

    def below(self, release: str) -> bool:
        """True only for a known version before `release`."""
        return self.known and parse(self.text) < parse(release)


def parse(text: str) -> Version:
    """A version; unreadable text counts as 0."""
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


def nearest(dependencies: Sequence[Dependency], package: str, file: str) -> Dependency | None:
    """The dependency closest to `file`: same folder, its parents, any other; locks before pins."""
    found = [d for d in dependencies if d.name == package]
    if not found:
        return None
    folder = posixpath.dirname(file)

    def rank(dependency: Dependency) -> tuple[int, int, Site]:
        other = posixpath.dirname(dependency.site.file)
        if other == folder:
            distance = 0
        elif folder.startswith(f"{other}/") or other == "":
            distance = 1 + folder.count("/") - other.count("/")
        else:
            distance = 100
        return distance, _KINDS.index(dependency.kind), dependency.site

    return min(found, key=rank)


def of_package(dependencies: Sequence[Dependency], package: str, file: str) -> Declared:
    """The declared version of a package near a file."""
    found = nearest(dependencies, package, file)
    if found is None:
        return Declared()
    if found.kind in ("lock", "pin"):
        return Declared(found.version, "lock file" if found.kind == "lock" else "pin", found.site, True)
    if found.kind == "range":
        bound = lower_bound(found.version)
        if bound:
            return Declared(bound, "lower bound", found.site, False)
    return Declared("", "unknown", found.site)


def of_vllm(unit: Unit, dependencies: Sequence[Dependency], given: str | None) -> Declared:
    """``--vllm-version``, image tag, lock file, exact pin, lower bound; in this order."""
    if given:
        return Declared(given, "given", None, True)
    image = unit.image
    if image is not None and isinstance(image.value, str):
        tag = image_tag(image.value)
        match = _TAG.match(tag or "")
        name = image.value.rsplit("/", 1)[-1]
        if match and "vllm" in name and "lmcache" not in image.value:
            return Declared(match.group(1), "image tag", image.site, True)
    return of_package(dependencies, "vllm", unit.site.file)


def image_tag(image: str) -> str | None:
    """The tag of an image reference, or None."""
    name = image.partition("@")[0].rsplit("/", 1)[-1]
    return name.partition(":")[2] or None


def lower_bound(specifier: str) -> str:
    """The lowest release that a specifier names, '' if it has no lower bound."""
    try:
        found = [
            s.version.replace(".*", "")
            for s in SpecifierSet(specifier)
            if s.operator in (">=", ">", "~=", "==")
        ]
    except InvalidSpecifier:
        return ""
    return max(found, key=parse) if found else ""


def allows(specifier: str, version: str) -> bool:
    """True if `version` lies in `specifier`."""
    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidSpecifier:
        return True


def ranges_meet(supported: str, declared: str) -> bool:
    """True unless every release that `declared` allows lies outside `supported` (by their bounds)."""
    bound = lower_bound(declared)
    upper = [s.version for s in SpecifierSet(supported) if s.operator in ("<=", "<", "==")]
    return not bound or not upper or parse(bound) <= max(map(parse, upper))


def minor_behind(text: str) -> int:
    """How many minor releases `text` is behind the reference (same major)."""
    declared, current = parse(text), parse(names.reference())
    return current.minor - declared.minor if declared.major == current.major else 99
