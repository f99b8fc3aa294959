"""Every rule row has a project that triggers it and one that does not (the table is `cases`)."""

from __future__ import annotations

import pytest
from cases import Case, abc, defg, hijx, k
from conftest import Audit
from lvllm.audit import modes
from lvllm.audit.checks.hybrid_host import thread_count
from lvllm.audit.checks.registry import checks
from lvllm.audit.checks.rules import MAXIMA, items, rules

CASES = [*abc.CASES, *defg.CASES, *hijx.CASES, *k.CASES]
# Rows that need this machine to have a property; tested below without a project.
ELSEWHERE = {"K2.none_left"}


def _name(case: Case) -> str:
    same = [c for c in CASES if c.rule == case.rule]
    return case.rule if len(same) == 1 else f"{case.rule}-{same.index(case) + 1}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_row(case: Case, audit: Audit) -> None:
    run = audit(case.files, *case.args)
    assert case.rule in run.rules, [r for r in run.rules if r.startswith(case.rule.split(".")[0] + ".")]
    rule = rules()[case.rule]
    assert run.priority(case.rule) == rule.priority
    if case.without is not None:
        options = case.args if case.without_args is None else case.without_args
        other = audit(case.without, *options)
        assert case.rule not in other.rules


def test_every_row_is_triggered() -> None:
    covered = {c.rule for c in CASES} | ELSEWHERE
    assert sorted(set(rules()) - covered) == []
    assert sorted(covered - set(rules())) == []


def test_every_recommendation_has_a_near_miss() -> None:
    """Rows with a priority need their own project that must not give them; the others have each other's."""
    missing = {r.id for r in rules().values() if r.priority} - ELSEWHERE
    missing -= {c.rule for c in CASES if c.without is not None}
    assert sorted(missing) == []
    for rule in rules().values():
        if rule.priority is None:
            assert any(c.rule != rule.id and c.rule.split(".")[0] == rule.item for c in CASES), rule.id


def test_every_item_has_one_check() -> None:
    assert sorted(checks()) == sorted(i for i in items() if i[0] in MAXIMA and i not in ("J5", "J6"))
    for category, maximum in MAXIMA.items():
        assert sum(i[0] == category for i in checks()) == maximum
    assert sum(m for c, m in MAXIMA.items() if c != "K") == 52


def test_every_row_is_complete() -> None:
    for rule in rules().values():
        for lang in ("en", "zh"):
            assert rule.text(lang), rule.id
            assert bool(rule.text(lang, "change")) == (rule.priority is not None), rule.id
        assert (rule.status == "recommended") == (rule.priority is not None), rule.id


def test_threads_without_hyper_threading() -> None:
    """K2.none_left needs a machine whose hyper-threading is known to be off."""
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from lvllm.audit import hardware, pipeline

    with TemporaryDirectory() as folder:
        script = Path(folder) / "s.sh"
        script.write_text("export LVLLM_MOE_NUMA_ENABLED=1 LK_THREADS=7\nvllm serve Qwen/Qwen3-30B-A3B\n")
        result = pipeline.run(pipeline.Request(script, given=hardware.Given(cores="8")))
    context = result.units[0].context
    assert context.mode == modes.SERVE
    assert thread_count(context).rule.id == "K2.ok"
    context.hardware.smt = False
    assert thread_count(context).rule.id == "K2.none_left"
