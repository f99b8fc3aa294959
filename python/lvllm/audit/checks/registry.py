"""Registration of checks, and the run over one unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lvllm.audit.checks.context import Context, Outcome

Check = Callable[[Context], Outcome]
Advisory = Callable[[Context], Sequence[Outcome]]

_CHECKS: dict[str, Check] = {}
_ADVISORIES: list[Advisory] = []


def check(item: str) -> Callable[[Check], Check]:
    """Registers the one function that decides an item."""

    def register(function: Check) -> Check:
        if item in _CHECKS:
            raise ValueError(f"two checks for {item}")
        _CHECKS[item] = function
        return function

    return register


def advisory(function: Advisory) -> Advisory:
    """Registers a function that yields unscored findings of a unit."""
    _ADVISORIES.append(function)
    return function


def checks() -> dict[str, Check]:
    """Item → function, in order of category and number."""
    from lvllm.audit.checks import load_all

    load_all()
    return dict(sorted(_CHECKS.items(), key=lambda kv: (kv[0][0], int(kv[0][1:]))))


def advisories() -> list[Advisory]:
    from lvllm.audit.checks import load_all

    load_all()
    return list(_ADVISORIES)
