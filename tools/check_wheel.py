#!/usr/bin/env python3
"""Check a built wheel: what it links, what it carries, and that it imports where vLLM and torch are absent.

    python3 tools/check_wheel.py dist/lvllm-3.0.0-cp311-abi3-manylinux_2_28_x86_64.whl

Needs `objdump` (binutils). Every check prints one line; the exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MAX_BYTES = 10_000_000
ROOT = Path(__file__).resolve().parent.parent

# What every glibc system has; anything else must travel inside the wheel.
SYSTEM_LIBRARIES = re.compile(r"^(libc|libm|libdl|libpthread|librt|libgcc_s|ld-linux-[a-z0-9-]+)\.so\.\d+$")
FOREIGN_SYMBOLS = re.compile(r"\b(_ZNK?3c10|_ZNK?2at|_ZNK?5torch|c10::|cuda[A-Z]\w+|cu[A-Z][a-z]\w+)")


class Report:
    def __init__(self) -> None:
        self.passed = 0
        self.failed = 0

    def check(self, what: str, ok: bool, detail: object = "") -> None:
        self.passed += ok
        self.failed += not ok
        suffix = f": {detail}" if detail != "" else ""
        print(f"{'ok  ' if ok else 'FAIL'} {what}{suffix}", flush=True)


def glibc_of_tag(wheel: Path) -> tuple[int, int] | None:
    """glibc release that the platform tag promises; None for a tag that promises none."""
    releases = [(int(a), int(b)) for a, b in re.findall(r"manylinux_(\d+)_(\d+)_", wheel.name)]
    return min(releases) if releases else None


def objdump(*args: str | Path) -> str:
    return subprocess.run(["objdump", *args], capture_output=True, text=True, check=True).stdout


def needed(library: Path) -> list[str]:
    return re.findall(r"^\s+NEEDED\s+(\S+)", objdump("-p", library), re.MULTILINE)


def newest_glibc(library: Path) -> tuple[int, ...]:
    found = re.findall(r"GLIBC_([0-9.]+)", objdump("-T", library))
    return max((tuple(map(int, version.split("."))) for version in found), default=(0,))


def check_libraries(report: Report, unpacked: Path, tag: tuple[int, int] | None) -> None:
    bundled = {path.name for path in unpacked.glob("lvllm.libs/*.so*")}
    module = unpacked / "lvllm" / "_lk.abi3.so"
    report.check("native module is lvllm/_lk.abi3.so", module.exists())
    if not module.exists():
        return
    for library in [module, *sorted(unpacked.glob("lvllm.libs/*.so*"))]:
        name = library.relative_to(unpacked)
        foreign = [n for n in needed(library) if n not in bundled and not SYSTEM_LIBRARIES.match(n)]
        report.check(
            f"{name} needs only glibc and lvllm.libs", not foreign, ", ".join(foreign) or needed(library)
        )
        newest = newest_glibc(library)
        if tag is not None:
            report.check(
                f"{name} asks for no glibc newer than {tag[0]}.{tag[1]}",
                newest <= tag,
                "newest symbol version " + ".".join(map(str, newest)),
            )
        undefined = [line.split()[-1] for line in objdump("-T", library).splitlines() if "*UND*" in line]
        foreign = sorted(symbol for symbol in undefined if FOREIGN_SYMBOLS.search(symbol))
        report.check(f"{name} has no libtorch or CUDA symbols", not foreign, ", ".join(foreign[:5]))


def check_content(report: Report, unpacked: Path, names: set[str]) -> None:
    for wanted in ("lvllm/__init__.py", "lvllm/py.typed", "lvllm/_lk.pyi", "lvllm/plugin.py", "lvllm/cli.py"):
        report.check(f"contains {wanted}", wanted in names)
    licenses = [name for name in names if re.search(r"\.dist-info/licenses/LICENSE", name)]
    report.check("contains LICENSE", bool(licenses))
    # hwloc is part of the binary or copied beside it, and its licence asks for its notice.
    hwloc = [name for name in names if ".dist-info/licenses/" in name and "hwloc" in name]
    report.check("contains the licence of the hwloc that it carries", bool(hwloc))
    entry = next((name for name in names if name.endswith(".dist-info/entry_points.txt")), "")
    text = (unpacked / entry).read_text() if entry else ""
    report.check(
        "registers the vLLM plugin", "[vllm.general_plugins]" in text and "lvllm.plugin:register" in text
    )
    report.check("registers the lvllm command", "lvllm.cli:main" in text)

    # The engine compiles these on the user's GPU; they are embedded in the module or lie beside it.
    module = unpacked / "lvllm" / "_lk.abi3.so"
    binary = module.read_bytes() if module.exists() else b""
    for source in sorted((ROOT / "kernels" / "cuda").glob("*.cu")):
        as_file = any(name.endswith(f"/{source.name}") for name in names)
        report.check(f"carries {source.name}", as_file or source.read_bytes() in binary)
    folders = [folder for folder in (str(ROOT), f"{Path.home()}/") if folder.encode() in binary]
    report.check("names no folder of the build machine", not folders, ", ".join(folders))
    junk = [name for name in names if re.search(r"__pycache__|\.pyc$|/tests?/|\.so\.dbg", name)]
    report.check("carries no tests, caches or debug files", not junk, ", ".join(junk[:3]))


def check_import(report: Report, wheel: Path, folder: Path) -> None:
    """Install into an empty environment: no torch, no vLLM, no other package."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    python = venv / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel.resolve()]
    done = subprocess.run(install, capture_output=True, text=True, check=False, cwd=folder)
    report.check("installs without other packages", done.returncode == 0, done.stderr.strip()[-300:])
    version = wheel.name.split("-")[1]
    code = (
        "import lvllm, lvllm._lk, sys; "
        "heavy = sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)); "
        "print(lvllm.__version__, *heavy)"
    )
    run = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, cwd=folder)
    report.check(
        "`import lvllm` works without torch and vLLM",
        run.returncode == 0 and run.stdout.split() == [version],
        run.stdout.strip() or run.stderr.strip()[-500:],
    )
    run = subprocess.run(
        [venv / "bin" / "lvllm", "--help"], capture_output=True, text=True, check=False, cwd=folder
    )
    report.check(
        "`lvllm --help` works", run.returncode == 0 and "doctor" in run.stdout, run.stderr.strip()[-500:]
    )
    code = "import lvllm.plugin; lvllm.plugin.register()"
    off = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, cwd=folder)
    report.check(
        "the plugin is inert while it is switched off", off.returncode == 0, off.stderr.strip()[-500:]
    )

    # An unloadable native module must be named, never passed over.
    module = next(venv.glob("lib/python*/site-packages/lvllm/_lk.abi3.so"))
    module.write_bytes(b"")
    code = "import lvllm.native; lvllm.native.load()"
    run = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, cwd=folder)
    report.check(
        "a broken native module is an error that names it",
        run.returncode != 0 and "lvllm._lk cannot be loaded" in run.stderr,
        run.stderr.strip().splitlines()[-1:] or "no error",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel
    report = Report()

    size = wheel.stat().st_size
    report.check("smaller than 10 MB", size < MAX_BYTES, f"{size / 1e6:.1f} MB")
    tag = glibc_of_tag(wheel)
    report.check("abi3 for Python >= 3.11", "-cp311-abi3-" in wheel.name, wheel.name)
    report.check("manylinux tag of 2.28 to 2.36", tag is not None and (2, 28) <= tag <= (2, 36), tag)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "wheel")
            names = set(archive.namelist())
        check_libraries(report, folder / "wheel", tag)
        check_content(report, folder / "wheel", names)
        check_import(report, wheel, folder)
    print(f"{report.passed} passed, {report.failed} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
