"""X. Unscored findings: image tags, secrets, unknown and removed names, dropped lines."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from lvllm.audit import names
from lvllm.audit.checks.context import Context, Edit, Outcome, with_priority
from lvllm.audit.checks.registry import advisory
from lvllm.audit.facts import Fact
from lvllm.audit.values import nearest
from lvllm.audit.versions import image_tag

_PYTHON_LAUNCHERS = ("LLM", "engine")


@advisory
def image_latest(c: Context) -> Sequence[Outcome]:
    """X1."""
    image = c.unit.image
    if image is None or not isinstance(image.value, str) or "@sha256:" in image.value:
        return []
    tag = image_tag(image.value)
    if "vllm" in image.value and (tag is None or tag == "latest" or tag.startswith("latest-")):
        return [c.out("X1.latest", image, image=image.value)]
    return []


@advisory
def unknown_variables(c: Context) -> Sequence[Outcome]:
    """X3, and X4 for variables that vLLM no longer reads."""
    found = []
    for name, fact in sorted(c.unit.env.items()):
        if not name.startswith("VLLM_") or name in names.environment():
            continue
        row = names.removed("environment").get(name)
        strict = c.flag("fail_on_environ_validation") is True
        if row is not None:
            if "owner" not in row and c.gone(row["gone"]):
                edits = [Edit(name, None, env=True)]
                found.append(
                    c.out("X4.env_gone", fact, gone=row["gone"], use=row["use"] or "@nothing", edits=edits)
                )
            continue
        if _of_own_template(c, name):
            continue
        near = nearest(name, sorted(names.environment()))
        hint = f" (did you mean {near}?)" if near else ""
        rule = "X3.refused" if strict else "X3.unknown"
        found.append(c.out(rule, fact, name=name, near=hint, reference=names.reference()))
    return found


def _of_own_template(c: Context, name: str) -> bool:
    """A project's own variable that merely starts with VLLM_ and only feeds its command line."""
    launch = c.unit.launch
    return launch is not None and any(f"${name}" in w.raw or f"${{{name}" in w.raw for w in launch.words)


@advisory
def removed_names(c: Context) -> Sequence[Outcome]:
    """X4: options, keywords, sampling fields and framework keys that no longer exist."""
    return [*_options(c), *_sampling(c), *_renamed(c)]


def _options(c: Context) -> Iterator[Outcome]:
    python = c.unit.launcher in _PYTHON_LAUNCHERS
    known = sorted(names.keywords() if python else names.options() | names.fields().keys())
    for fact in sorted(c.unit.unknown, key=lambda f: (f.site, f.name)):
        row = names.removed("options").get(fact.name)
        if row is not None:
            release = row.get("gone_llm", row["gone"]) if python else row["gone"]
            if "owner" in row:
                continue
            if not c.gone(release):
                yield c.out("X4.going", fact, gone=release, use=row["use"] or "@nothing")
                continue
            kind = "@kind_keyword" if python else "@kind_option"
            edits = [Edit(fact.name, None)]
            yield c.out("X4.gone", fact, gone=release, use=row["use"] or "@nothing", kind=kind, edits=edits)
            continue
        near = nearest(fact.name, known)
        if near is not None:
            spelled = near if python or not fact.written.startswith("-") else f"--{near.replace('_', '-')}"
            found = c.out("X4.misspelt", fact, near=spelled)
            # An older release may have had the name: the table is that of the reference.
            older = c.version.below(names.reference()) and found.priority == "P0"
            yield with_priority(found, "P1") if older else found
        elif not c.version.known or c.version.at_least(names.reference()):
            yield c.out("X4.unknown", fact, reference=names.reference())


def _sampling(c: Context) -> Iterator[Outcome]:
    seen = set()
    for fact in c.unit.sampling:
        row = names.removed("sampling").get(fact.name)
        if row is None or fact.name in seen:
            continue
        seen.add(fact.name)
        name = f"SamplingParams({fact.written or fact.name})"
        rule = "X4.gone" if c.gone(row["gone"]) else "X4.going"
        yield c.out(rule, fact, name=name, gone=row["gone"], use=row["use"], kind="@kind_keyword")


def _renamed(c: Context) -> Iterator[Outcome]:
    for key, fact in sorted(c.unit.keys.items()):
        if key.startswith("renamed:"):
            yield c.out("X4.renamed", fact, name=fact.written or fact.name, framework=c.unit.framework or "",
                        use=fact.value or "@nothing")  # fmt: skip


@advisory
def deprecated(c: Context) -> Sequence[Outcome]:
    """X5."""
    found = [c.fact(n) for n in names.table("options")["deprecated"]]
    outcomes = [c.out("X5.deprecated", f, reference=names.reference()) for f in found if f is not None]
    backend = c.mapping("structured_outputs_config").get("backend")
    if backend == "lm-format-enforcer":
        outcomes.append(
            c.out("X5.deprecated", c.fact("structured_outputs_config"), name="lm-format-enforcer",
                  reference=names.reference())
        )  # fmt: skip
    return outcomes


@advisory
def hardware(c: Context) -> Sequence[Outcome]:
    """X6."""
    gpu = c.hardware.gpu
    if gpu is not None and gpu.sm < 75:
        site = c.unit.resources.gpu_name or c.unit.site
        return [c.out("X6.too_old", site, gpu=gpu.name, sm=f"{gpu.sm / 10:.1f}", reference=names.reference())]
    return []


@advisory
def dropped_lines(c: Context) -> Sequence[Outcome]:
    """X7: what stock vLLM does not read of a file given to ``vllm serve``."""
    unread = c.key("config=")
    found = [] if unread is None else [c.out("X7.not_read", unread)]
    for fact in sorted(c.unit.dropped, key=lambda f: f.site):
        rule = "X7.harmless" if _false_already(fact) else "X7.dropped"
        found.append(c.out(rule, fact, name=fact.written, option=fact.name.replace("_", "-")))
    return found


def _false_already(fact: Fact) -> bool:
    return names.fields().get(fact.name) is False or fact.name in names.table("options")["false_by_default"]


def near_hybrid(name: str, known: Sequence[str]) -> str:
    """The hint that the engine itself would give for an unknown LVLLM_/LK_ name."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {found[0]}?)" if found else ""
