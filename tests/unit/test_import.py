"""What importing and registering loads, and what it says when it cannot."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import lvllm
import pytest

PACKAGE = Path(lvllm.__file__).parent


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LVLLM_", "LK_"))} | environ
    env.setdefault("PYTHONPATH", os.pathsep.join([str(PACKAGE.parent), *filter(None, sys.path)]))
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "code", ["import lvllm", "import lvllm.cli", "import lvllm.plugin as p; p.register()"]
)
def test_import_and_a_switched_off_plugin_load_nothing_heavy(code: str) -> None:
    heavy = "('torch', 'vllm', 'numpy', 'lvllm._lk')"
    result = python(f"{code}; import sys; print([m for m in {heavy} if m in sys.modules])")
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr


@pytest.mark.parametrize("value", ["0", "", "off"])
def test_the_switch_at_zero_changes_no_environment(value: str) -> None:
    code = "import os; e = {**os.environ}; import lvllm.plugin as p; p.register(); print(e == {**os.environ})"
    assert python(code, LVLLM_MOE_NUMA_ENABLED=value).stdout.strip() == "True"


def test_no_thread_is_started_before_an_engine_is_made() -> None:
    code = "import os, lvllm.engine, lvllm.native as n; n.load(); print(len(os.listdir('/proc/self/task')))"
    assert python(code).stdout.strip() == "1"


def test_an_unknown_setting_ends_registration_before_vllm_is_imported() -> None:
    code = (
        "import sys, lvllm.plugin as p\n"
        "try: p.register()\n"
        "except ValueError as e: print(e, 'vllm' in sys.modules)"
    )
    result = python(code, LVLLM_MOE_NUMA_ENABLED="1", LK_TREADS="4")
    assert "LK_TREADS is not a setting of lvllm; did you mean LK_THREADS?" in result.stdout
    assert result.stdout.strip().endswith("False")


def test_a_misspelt_switch_warns() -> None:
    result = python("import lvllm.plugin as p; p.register()", LVLLM_MOE_NUMA_ENABLE="1")
    assert "did you mean LVLLM_MOE_NUMA_ENABLED" in result.stderr
    assert result.returncode == 0


@pytest.fixture(scope="module")
def emptied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package whose native module is an empty file."""
    root = tmp_path_factory.mktemp("emptied")
    shutil.copytree(PACKAGE, root / "lvllm", ignore=shutil.ignore_patterns("__pycache__"))
    modules = list((root / "lvllm").glob("_lk*.so"))
    assert modules, "the package under test has no native module"
    for module in modules:
        module.unlink()
        module.touch()
    return root


def test_a_broken_native_module_is_named_with_the_loaders_message(emptied: Path) -> None:
    result = python("import lvllm; lvllm.Engine()", PYTHONPATH=str(emptied))
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert "lvllm.native.NativeModuleError: lvllm: the native module lvllm._lk cannot be loaded" in last
    assert "file too short" in last
    assert "pip install" in last


def test_a_broken_native_module_does_not_disturb_a_switched_off_plugin(emptied: Path) -> None:
    result = python("import lvllm.plugin as p; p.register(); print('fine')", PYTHONPATH=str(emptied))
    assert result.stdout.strip() == "fine"


def test_engine_names_are_reached_lazily() -> None:
    assert {"Engine", "MoELayer", "LkError", "NativeModuleError"} <= set(dir(lvllm))
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = lvllm.nothing_like_this
