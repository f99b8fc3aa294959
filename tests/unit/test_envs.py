"""Settings: types, unknown names, aliases, merge, printing, and the documents against the table."""

import re
from pathlib import Path

import pytest
from lvllm import envs
from lvllm.flags import FLAGS, NO_EFFECT, markdown

ON = {"LVLLM_MOE_NUMA_ENABLED": "1"}

LEGAL = {
    "LVLLM_MOE_NUMA_ENABLED": ("1", True),
    "LK_THREADS": ("7", 7),
    "LK_THREAD_BINDING": ("NUMA_NODE", "numa_node"),
    "LVLLM_NUMA_NODES": ("0-1,4", (0, 1, 4)),
    "LVLLM_GPU_RESIDENT_MOE_LAYERS": ("0-1", "0-1"),
    "LVLLM_GPU_RESIDENT_MOE_LAYERS_SPEC": ("0", "0"),
    "LVLLM_GPU_PREFILL_MIN_BATCH_SIZE": ("512", 512),
    "LVLLM_GPU_PREFETCH_WINDOW": ("2", 2),
    "LVLLM_ENABLE_NUMA_INTERLEAVE": ("0", False),
    "LK_POWER_SAVING": ("1", True),
    "LVLLM_STEP_TIMEOUT_S": ("30", 30.0),
    "LVLLM_HOST_GIB": ("12.5", 12.5),
    "LVLLM_KERNEL": ("F32_FMA", "f32_fma"),
    "LVLLM_ISA": ("avx2", "avx2"),
    "LVLLM_COMPUTE": ("int8", "int8"),
}
ILLEGAL = {
    "LVLLM_MOE_NUMA_ENABLED": ["2", "maybe"],
    "LK_THREADS": ["0", "-4", "many", "1.5"],
    "LK_THREAD_BINDING": ["socket"],
    "LVLLM_NUMA_NODES": ["1-0", "a"],
    "LVLLM_GPU_RESIDENT_MOE_LAYERS": ["2-0", "-1", "x:1"],
    "LVLLM_GPU_RESIDENT_MOE_LAYERS_SPEC": ["2-0"],
    "LVLLM_GPU_PREFILL_MIN_BATCH_SIZE": ["-1", "large"],
    "LVLLM_GPU_PREFETCH_WINDOW": ["0", "65"],
    "LVLLM_ENABLE_NUMA_INTERLEAVE": ["interleave"],
    "LK_POWER_SAVING": ["2"],
    "LVLLM_STEP_TIMEOUT_S": ["0", "inf", "nan", "soon"],
    "LVLLM_HOST_GIB": ["0", "-1"],
    "LVLLM_KERNEL": ["f64"],
    "LVLLM_ISA": ["sse2"],
    "LVLLM_COMPUTE": ["int4"],
}


@pytest.mark.parametrize("flag", FLAGS, ids=lambda f: f.name)
def test_every_flag_takes_a_legal_value_and_says_where_it_came_from(flag: envs.Flag) -> None:
    text, value = LEGAL[flag.name]
    settings = envs.load(environ={flag.name: text})
    got = getattr(settings, flag.key)
    assert (str(got) if isinstance(value, str) else got) == value
    assert settings.origin[flag.key] == "environment"
    assert getattr(settings, flag.key) != flag.default, "the test must flip the value"


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in ILLEGAL.items() for v in values])
def test_illegal_values_are_errors_that_name_flag_value_and_what_is_allowed(name: str, value: str) -> None:
    with pytest.raises(envs.SettingError, match=rf"{name}='{re.escape(value)}'.*allowed: .+"):
        envs.load(environ={name: value})


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.aliases], ids=lambda f: f.name)
def test_aliases_set_the_same_value_with_a_notice(flag: envs.Flag) -> None:
    text, _ = LEGAL[flag.name]
    expected = getattr(envs.load(environ={flag.name: text}), flag.key)
    for alias in flag.aliases:
        settings = envs.load(environ={alias: text})
        assert getattr(settings, flag.key) == expected
        assert settings.notices == (f"{alias} is an alias of {flag.name}",)


def test_an_alias_that_contradicts_its_name_is_an_error() -> None:
    environ = {"LVLLM_GPU_PREFETCH_WINDOW": "1", "LK_GPU_PREFETCH_WINDOW": "2"}
    with pytest.raises(envs.SettingError, match="contradicts"):
        envs.load(environ=environ)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("LVLLM_GPU_PREFIL_MIN_BATCH_SIZE", "LVLLM_GPU_PREFILL_MIN_BATCH_SIZE"),
        ("LK_THREAD", "LK_THREADS"),
        ("LVLLM_KERNELS", "LVLLM_KERNEL"),
    ],
)
def test_unknown_names_are_errors_with_the_nearest_known_one(name: str, near: str) -> None:
    with pytest.raises(envs.SettingError, match=f"{name} is not a setting.*did you mean {near}\\?"):
        envs.load(environ={name: "1"})


@pytest.mark.parametrize("name", NO_EFFECT)
def test_names_without_effect_are_answered(name: str) -> None:
    assert f"{name} is accepted and has no effect" in envs.load(environ={name: "anything"}).notices[0]


def test_an_empty_value_is_unset() -> None:
    assert envs.load(environ={"LK_THREADS": " "}).origin["threads"] == "default"


def test_environment_wins_over_additional_config_and_says_so() -> None:
    section = {"threads": 4, "LVLLM_COMPUTE": "int8", "power_saving": True}
    settings = envs.load(section, environ={"LK_THREADS": "8"})
    assert (settings.threads, settings.compute, settings.power_saving) == (8, "int8", True)
    assert settings.origin["threads"] == "environment"
    assert settings.origin["compute"] == "additional_config"
    assert any("LK_THREADS of the environment overrides" in n for n in settings.notices)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"thread": 4}, "did you mean threads"),
        ({"threads": "x"}, "allowed: a whole number"),
        ({"moe_numa_enabled": 1}, "cannot be given in additional_config"),
        ([1], "must be an object"),
    ],
)
def test_additional_config_is_as_strict(section: object, message: str) -> None:
    with pytest.raises(envs.SettingError, match=message):
        envs.load(section, environ={})


@pytest.mark.parametrize(
    ("environ", "on"),
    [
        ({}, False),
        ({"LVLLM_MOE_NUMA_ENABLED": "0"}, False),
        (ON, True),
        ({"LK_MOE_HYBRID_ENABLED": "1"}, True),
    ],
)
def test_switch(environ: dict[str, str], on: bool) -> None:
    assert envs.switch_is_on(environ) is on


def test_a_misspelt_switch_is_noticed_only_while_the_switch_is_unset() -> None:
    assert envs.misspelt_switch({"LVLLM_MOE_NUMA_ENABLE": "1"}) == "LVLLM_MOE_NUMA_ENABLE"
    assert envs.misspelt_switch({"LVLLM_MOE_NUMA_ENABLE": "1", "LVLLM_MOE_NUMA_ENABLED": "0"}) is None
    assert envs.misspelt_switch({"LVLLM_COMPUTE": "int8"}) is None


def test_what_can_have_no_effect_says_so() -> None:
    environ = {"LVLLM_GPU_PREFETCH_WINDOW": "2", "LVLLM_GPU_RESIDENT_MOE_LAYERS": "auto"}
    on_cpu = envs.notices(envs.load(environ=environ), on_gpu=False)
    assert any("LVLLM_GPU_PREFETCH_WINDOW has no effect" in line for line in on_cpu)
    assert any("LVLLM_GPU_RESIDENT_MOE_LAYERS=auto has no effect" in line for line in on_cpu)
    assert envs.notices(envs.load(environ={}), on_gpu=False) == []


def test_the_table_prints_value_and_origin_of_every_flag() -> None:
    text = envs.format_table(envs.load(environ={"LK_THREADS": "3"}).table())
    assert len(text.splitlines()) == len(FLAGS) + 1
    assert re.search(r"LK_THREADS +3 +environment", text)


def documents(repository: Path) -> list[Path]:
    return [p for p in (repository / "README.md", repository / "docs" / "flags.md") if p.is_file()]


def test_documents_name_only_known_flags_and_their_defaults(repository: Path) -> None:
    known = {n for f in FLAGS for n in (f.name, *f.aliases)} | set(NO_EFFECT)
    defaults = {f.name: f.default_text for f in FLAGS}
    for document in documents(repository):
        text = document.read_text()
        named = set(re.findall(r"\b(?:LVLLM|LK)_[A-Z][A-Z0-9_]*\b", text))
        assert named <= known, f"{document.name} names settings that do not exist"
        for line in text.splitlines():
            row = re.match(r"\|\s*`(\w+)`[^|]*\|([^|]*)\|", line)
            if row and row[1] in defaults:
                assert row[2].strip().strip("`") == defaults[row[1]], f"{document.name}: default of {row[1]}"


def test_the_flags_document_is_the_table(repository: Path) -> None:
    """`python -m lvllm.flags > docs/flags.md` renews it."""
    assert (repository / "docs" / "flags.md").read_text() == markdown()
