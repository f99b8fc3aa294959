"""The command `lvllm`. Subcommands import what they need when they run, so that `--help` is instant."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from lvllm import envs

EXIT_OK, EXIT_PROBLEMS, EXIT_USAGE = 0, 1, 2
_PASS_THROUGH = ("serve", "audit")


def _doctor(args: argparse.Namespace) -> int:
    from lvllm import doctor

    return doctor.main(as_json=args.json, measure=not args.no_measure)


def _bench(args: argparse.Namespace) -> int:
    from lvllm import bench

    return bench.main(args)


def serve(rest: Sequence[str]) -> int:
    """Replace this process by `vllm serve` with the master switch on; every option is vLLM's own."""
    # An environment that is not activated has its commands beside the interpreter only.
    program = shutil.which("vllm") or shutil.which("vllm", path=os.path.dirname(sys.executable))
    if program is None:
        print(
            "lvllm serve: no command `vllm` beside this Python or on PATH; install vLLM (see lvllm doctor).",
            file=sys.stderr,
        )
        return EXIT_PROBLEMS
    from lvllm import native
    from lvllm.vllm import compat

    os.environ[envs.SWITCH.name] = "1"
    try:
        envs.load()
        compat.check()
        native.load()
    except (envs.SettingError, compat.UnsupportedVllmError, native.NativeModuleError) as error:
        print(f"lvllm serve: {error}", file=sys.stderr)
        return EXIT_PROBLEMS
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "lvllm" not in allowed.split(","):
        print(f"lvllm serve: VLLM_PLUGINS={allowed!r} keeps the plugin `lvllm` out; add it.", file=sys.stderr)
        return EXIT_PROBLEMS
    os.execv(program, [program, "serve", *rest])


def _audit(rest: Sequence[str]) -> int:
    from lvllm import audit

    return int(audit.main(list(rest)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lvllm", description="Routed experts of mixture-of-experts models on the CPU, beside stock vLLM."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser(
        "doctor", help="show the machine and the configuration as the engine sees them"
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.add_argument(
        "--no-measure", action="store_true", help="skip the measurement of the memory's read rate"
    )
    doctor.set_defaults(run=_doctor)

    bench = commands.add_parser("bench", help="time the expert kernels beside the memory's read rate")
    bench.add_argument("--format", action="append", help="weight format, may be repeated (default: bf16)")
    bench.add_argument(
        "--tokens", default="1,2,4,8,16,64", help="numbers of tokens of a step, comma-separated"
    )
    bench.add_argument("--hidden-size", type=int, default=2048)
    bench.add_argument("--intermediate-size", type=int, default=768)
    bench.add_argument("--experts", type=int, default=64)
    bench.add_argument("--top-k", type=int, default=8)
    bench.add_argument("--dtype", default="bf16", choices=("bf16", "f16", "f32"), help="dtype of activations")
    bench.add_argument("--threads", type=int, default=None)
    bench.add_argument("--seconds", type=float, default=1.0, help="time per row")
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    bench.set_defaults(run=_bench)

    # Their options are another program's: everything after the command goes through untouched (see main).
    commands.add_parser(
        "serve", help="vllm serve with the experts on the CPU; all of vLLM's options", add_help=False
    )
    commands.add_parser("audit", help="audit a project that uses vLLM", add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 fine, 1 problems found, 2 usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _PASS_THROUGH:
        return {"serve": serve, "audit": _audit}[arguments[0]](arguments[1:])
    args = _parser().parse_args(arguments)
    code: int = args.run(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
