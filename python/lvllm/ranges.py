"""The syntax of lists: `0`, `0-3,8` for nodes and CPUs; layers with `all`, `auto` and model parts on top."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")
_MAIN, _DRAFT = "main", "mtp"
_PARTS = {"main": _MAIN, "mtp": _DRAFT, "draft": _DRAFT, "spec": _DRAFT}


def _parse_range(text: str) -> range:
    match = _RANGE.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is neither a number nor a range such as 0-3")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"the range {text!r} runs backwards; write {last}-{first}")
    return range(first, last + 1)


def parse_numbers(text: str) -> tuple[int, ...]:
    """`0-1,4` as sorted distinct numbers; both ends of a range belong to it. ValueError on anything else."""
    numbers: set[int] = set()
    for piece in text.split(","):
        numbers.update(_parse_range(piece.strip()))
    return tuple(sorted(numbers))


def format_numbers(numbers: Collection[int]) -> str:
    """The inverse: `0-1,4`."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


@dataclass(frozen=True)
class LayerSpec:
    """A parsed layer list, not yet bound to a model.

    main, draft: numbers named for that part ("main:", "mtp:"); bare: numbers without a part; all_main,
    all_draft: the word `all`; auto: as many as fit.
    """

    text: str = ""
    main: frozenset[int] = frozenset()
    draft: frozenset[int] = frozenset()
    bare: frozenset[int] = frozenset()
    all_main: bool = False
    all_draft: bool = False
    auto: bool = False

    def __bool__(self) -> bool:
        return bool(self.main or self.draft or self.bare or self.all_main or self.all_draft or self.auto)

    def __str__(self) -> str:
        return self.text or "none"


@dataclass
class LayerSelection:
    """Layer numbers of one model: main counted from 0, draft counted from 0 as well."""

    main: set[int] = field(default_factory=set)
    draft: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def parse_layers(text: str, *, part: str | None = None) -> LayerSpec:
    """Parse `0`, `0-1,9`, `all`, `auto`, `main:0-2,mtp:0`. A part holds until the next part is named.

    part: the part that unprefixed numbers belong to ("mtp" for the draft layers' own variable); None leaves
    them bare, to be decided by the number of main layers.
    """
    stripped = text.strip()
    if stripped.lower() in ("", "none"):
        return LayerSpec()
    numbers: dict[str | None, set[int]] = {_MAIN: set(), _DRAFT: set(), None: set()}
    everything: set[str] = set()
    auto = False
    current = part
    for piece in stripped.split(","):
        prefix, colon, rest = piece.rpartition(":")
        if colon:
            name = prefix.strip().lower()
            if name not in _PARTS:
                raise ValueError(
                    f"unknown model part {name!r} in {piece.strip()!r}; allowed: {', '.join(_PARTS)}"
                )
            current = _PARTS[name]
        word = rest.strip().lower()
        if word == "all":
            everything.update({_MAIN, _DRAFT} if current is None else {current})
        elif word == "auto":
            auto = True
        else:
            numbers[current].update(_parse_range(rest.strip()))
    if auto and (everything or any(numbers.values())):
        raise ValueError("`auto` cannot be combined with layer numbers; give one or the other")
    return LayerSpec(
        text=stripped,
        main=frozenset(numbers[_MAIN]),
        draft=frozenset(numbers[_DRAFT]),
        bare=frozenset(numbers[None]),
        all_main=_MAIN in everything,
        all_draft=_DRAFT in everything,
        auto=auto,
    )


def select_layers(spec: LayerSpec, *, num_main: int, num_draft: int, variable: str) -> LayerSelection:
    """Bind a list to a model of num_main layers and num_draft draft (MTP) layers.

    Bare numbers from num_main on mean the draft layers in order, with a notice. A number beyond the last
    layer of its part is a ValueError that names the variable and the counts.
    """
    chosen = LayerSelection()

    def take(
        numbers: Collection[int], count: int, target: set[int], what: str, shown: Callable[[int], int]
    ) -> None:
        beyond = [shown(n) for n in sorted(numbers) if n >= count]
        if beyond:
            raise ValueError(
                f"{variable}={spec.text!r}: layers {format_numbers(beyond)} do not exist: the model has "
                f"{num_main} main layers (0-{num_main - 1}) and {num_draft} draft layers; {what}"
            )
        target.update(numbers)

    draft_from_bare = {n - num_main for n in spec.bare if n >= num_main}
    take(spec.main, num_main, chosen.main, "`main:` numbers count from 0", lambda n: n)
    take(spec.draft, num_draft, chosen.draft, "`mtp:` numbers count from 0", lambda n: n)
    take(
        draft_from_bare, num_draft, chosen.draft, "draft layers follow the main ones", lambda n: n + num_main
    )
    chosen.main.update(n for n in spec.bare if n < num_main)
    if draft_from_bare:
        asked = format_numbers({n + num_main for n in draft_from_bare})
        chosen.notes.append(
            f"{variable}={spec.text!r}: layers {asked} are taken as draft layers "
            f"{format_numbers(draft_from_bare)}; "
            f"mtp:{format_numbers(draft_from_bare)} says the same"
        )
    if spec.all_main:
        chosen.main.update(range(num_main))
    if spec.all_draft:
        chosen.draft.update(range(num_draft))
    return chosen
