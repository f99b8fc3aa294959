"""The command line of ``lvllm audit``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lvllm.audit import hardware, modes, pipeline
from lvllm.audit.checks.rules import CATEGORIES
from lvllm.audit.report import build, jsonfile, markdown
from lvllm.audit.versions import parse

OK, FOUND, USAGE, NOTHING = 0, 1, 2, 3
_LEVELS = {"p0": ("P0",), "p1": ("P0", "P1"), "p2": ("P0", "P1", "P2"), "never": ()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lvllm audit",
        description="Read a project that uses vLLM and report how it is configured, what is broken or "
        "outdated, and what to change. Only reads: nothing is imported, run or sent.",
        epilog="exit codes: 0 nothing at or above --fail-on, 1 something at or above it, 2 usage or "
        "unreadable, 3 no use of vLLM found",
    )
    add = parser.add_argument
    add("path", metavar="PATH", help="folder or file to audit")
    add("--format", choices=("md", "json"), default="md")
    add("--lang", choices=("en", "zh"), default="en", help="language of the report")
    add("--output", metavar="FILE", default="-", help="'-' is standard output (default)")
    add("--vllm-version", metavar="X.Y.Z", help="vLLM release in use")
    add(
        "--gpu",
        metavar="NAME[:COUNT]",
        action="append",
        default=[],
        help="GPU, such as A100-80:4; several by comma or repetition; 'local' reads this machine",
    )
    add("--gpu-mem", metavar="GIB", type=float, help="memory of one GPU")
    add("--cores", metavar="N", help="physical CPU cores; 'local' reads this machine")
    add("--numa-nodes", metavar="N", type=int)
    add("--ram", metavar="GIB", type=float, help="host memory")
    add("--model", metavar="NAME_OR_DIR", help="model name or folder with config.json")
    add("--mode", choices=modes.MODES)
    add("--goal", choices=("balanced", "throughput", "latency"), default="balanced")
    add("--category", metavar="A,B,…", help="only these categories")
    add("--unit", metavar="NAME", help="only the unit of this name, id or file (globs allowed)")
    add("--fail-on", choices=tuple(_LEVELS), default="p0", help="level that makes the exit code 1")
    add("--max-files", metavar="N", type=int, default=20_000)
    add("--exclude", metavar="GLOB", action="append", default=[])
    return parser


def _request(options: argparse.Namespace) -> pipeline.Request:
    categories = tuple(c.strip().upper() for c in (options.category or "").split(",") if c.strip())
    unknown = [c for c in categories if c not in CATEGORIES]
    if unknown:
        raise ValueError(f"--category {unknown[0]}: categories are {', '.join(CATEGORIES)}")
    if options.vllm_version and parse(options.vllm_version) == parse("0"):
        raise ValueError(f"--vllm-version {options.vllm_version}: not a version such as 0.33.0")
    if options.cores not in (None, "local") and not _positive(options.cores):
        raise ValueError(f"--cores {options.cores}: a positive number, or local")
    for name in ("gpu_mem", "ram", "numa_nodes", "max_files"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be positive")
    given = hardware.Given(
        tuple(options.gpu), options.gpu_mem, options.cores, options.numa_nodes, options.ram
    )
    return pipeline.Request(
        Path(options.path),
        options.vllm_version,
        given,
        options.model,
        options.mode,
        options.goal,
        categories,
        options.unit,
        options.max_files,
        tuple(options.exclude),
        options.lang,
    )


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run an audit; returns the exit code."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as stop:
        return OK if stop.code in (0, None) else USAGE
    try:
        request = _request(options)
        result = pipeline.run(request)
    except (ValueError, OSError) as error:
        return _fail(str(error) if not isinstance(error, FileNotFoundError) else f"{error}: no such path")
    if result.parsed and result.failed == result.parsed and not result.units:
        return _fail("nothing could be parsed: " + "; ".join(result.project.warnings[:3]))
    if not result.units:
        return _nothing(result)
    tree = build.tree(result)
    text = jsonfile.render(tree) if options.format == "json" else markdown.render(tree, result)
    if options.output == "-":
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.flush()
    else:
        try:
            Path(options.output).write_text(text, "utf-8", newline="\n")
        except OSError as error:
            return _fail(f"{options.output}: {error.strerror}")
    levels = _LEVELS[options.fail_on]
    return FOUND if any(tree["summary"][level.lower()] for level in levels) else OK


def _fail(message: str) -> int:
    print(f"lvllm audit: {message}", file=sys.stderr)
    return USAGE


def _nothing(result: pipeline.Result) -> int:
    print("lvllm audit: no use of vLLM found", file=sys.stderr)
    if result.project.other_engines:
        site = result.project.other_engines[0]
        print(f"lvllm audit: another engine is used ({site})", file=sys.stderr)
    for warning in result.project.warnings[:5]:
        print(f"lvllm audit: {result.vault.mask(warning)}", file=sys.stderr)
    return NOTHING
