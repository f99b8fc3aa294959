#!/usr/bin/env python3
"""Serve a small MoE model through stock `vllm serve` with its experts on the CPU, and ask it two questions.

    .venv/bin/python tools/demo.py [--model models/lvllm-tiny] [--timeout 300]

Starts the server on a free port of 127.0.0.1, waits until it is healthy, asks one chat question and one
completion, prints the answers beside what the engine reported of itself, and stops the server. The exit code
is 0 only if both answers came, the experts were computed by lvllm's engine, and the server ended cleanly.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAME = "lvllm-demo"
STOP_S = 60
# What vLLM's log formatter puts before a message: process, level, date, time and source line.
LOG_PREFIX = re.compile(r"^(\(.*?\) )?[A-Z]+ \d\d-\d\d [0-9:]+ \[[^\]]*\] ?")


class DemoError(Exception):
    """A failure to report in one line, with the server's last lines where they can explain it."""


class Server:
    """A `vllm serve` process in a process group of its own."""

    def __init__(self, model: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [
            str(Path(sys.executable).parent / "vllm"),
            "serve",
            str(model),
            "--served-model-name",
            NAME,
        ]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--max-num-seqs", "4"]
        env = dict(os.environ, LVLLM_MOE_NUMA_ENABLED="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            # The CPU platform would compile the model first, for which a C++ compiler is needed.
            command.append("--enforce-eager")
            env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        print(f"$ LVLLM_MOE_NUMA_ENABLED=1 {shlex.join([Path(command[0]).name, *command[1:]])}", flush=True)
        self.process = subprocess.Popen(
            command,
            env=env,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def request(self, path: str, body: dict[str, Any] | None = None, timeout: float = 120) -> bytes:
        """GET, or POST with a JSON body. Proxy settings do not apply to the loopback address."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=timeout) as response:
            return bytes(response.read())

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        try:
            answer = self.request(path, {"model": NAME, "temperature": 0, **body})
        except (urllib.error.URLError, OSError) as error:
            detail = (
                error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else error
            )
            raise DemoError(f"POST {path} failed: {detail}") from error
        return dict(json.loads(answer))

    def wait_healthy(self, limit_s: float) -> float:
        """Seconds until /health answered; DemoError when the server ended or the limit ran out."""
        started = time.monotonic()
        while time.monotonic() - started < limit_s:
            if (code := self.process.poll()) is not None:
                raise DemoError(f"the server ended with exit code {code} before it was ready")
            try:
                self.request("/health", timeout=5)
                return time.monotonic() - started
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise DemoError(f"the server was not ready after {limit_s:.0f} s")

    def messages(self) -> list[str]:
        """The log's lines without vLLM's prefix."""
        return [LOG_PREFIX.sub("", line) for line in self.log.read_text(errors="replace").splitlines()]

    def stop(self) -> int:
        """SIGTERM, then wait until no process of the group is left. Returns the server's exit code."""
        group = self.process.pid
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_S)
            deadline = time.monotonic() + STOP_S
            while time.monotonic() < deadline:
                os.killpg(group, 0)
                time.sleep(0.2)
        except ProcessLookupError:
            return code
        except subprocess.TimeoutExpired:
            pass
        os.killpg(group, signal.SIGKILL)
        self.process.wait()
        raise DemoError(f"the server, or a process of it, was still there {STOP_S} s after SIGTERM")


def tail(log: Path, count: int = 40) -> list[str]:
    """The log's last lines without the list of routes, which hides what came before it."""
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if "] Route: " not in line][-count:]


def report_engine(server: Server) -> None:
    """Print what the engine said of itself; DemoError if no layer's experts were on the host."""
    messages = server.messages()
    told = [m for m in messages if m.startswith("engine: ")]
    placed = [m.strip() for m in messages if re.match(r"\s+\S+:[0-9,-]+\s+-> (host|stock)\b", m)]
    if not any("-> host" in line for line in placed):
        raise DemoError("the server answered, but its log places no layer's experts on the host")
    for line in dict.fromkeys(told):
        print(line)
    for line in dict.fromkeys(placed):
        print(f"experts {line}")
    metrics = server.request("/metrics").decode().splitlines()
    for line in metrics:
        if line.startswith("lvllm") and "_bucket{" not in line and "_created" not in line:
            print(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "lvllm-tiny")
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds that the server may take to start"
    )
    parser.add_argument("--question", default="Tell me a story.")
    parser.add_argument("--prompt", default="Once upon a time")
    args = parser.parse_args()
    model = args.model.resolve()
    if not (model / "config.json").exists():
        raise DemoError(f"no model at {args.model}")

    with tempfile.TemporaryDirectory(prefix="lvllm-demo-") as folder:
        log = Path(folder) / "server.log"
        server = Server(model, log)
        try:
            print(f"server ready after {server.wait_healthy(args.timeout):.0f} s", flush=True)
            started = time.monotonic()
            messages = [{"role": "user", "content": args.question}]
            chat = server.ask("/v1/chat/completions", messages=messages, max_tokens=96)
            answer = chat["choices"][0]["message"]["content"].strip()
            print(f"\n> {args.question}\n{answer}\n")
            completion = server.ask("/v1/completions", prompt=args.prompt, max_tokens=96)
            text = completion["choices"][0]["text"]
            elapsed = time.monotonic() - started
            print(f"> {args.prompt}{text}\n")
            tokens = sum(a["usage"]["completion_tokens"] for a in (chat, completion))
            report_engine(server)
            rate = f"{tokens} tokens in {elapsed:.2f} s, {tokens / elapsed:.1f} tokens/s"
            print(f"{rate}, one request at a time")
            if not answer or not text.strip():
                raise DemoError("an answer was empty")
            code = server.stop()
        except BaseException as error:
            if isinstance(error, DemoError):
                print("".join(f"| {line}\n" for line in tail(log)))
            if server.process.poll() is None:
                os.killpg(server.process.pid, signal.SIGKILL)
                server.process.wait()
            raise
        if code not in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
            raise DemoError(f"the server ended with exit code {code} on SIGTERM")
    print("server stopped; the demo succeeded")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DemoError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        sys.exit(1)
