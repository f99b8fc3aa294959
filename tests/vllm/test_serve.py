"""`lvllm serve` over HTTP: completions, chat, many requests at once of which some are cancelled."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import StockCache, environment

START_S, REQUEST_S = 300, 120
PROMPT = "the quick brown fox"  # the first of run_engine.PROMPTS


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """One server process; every request goes to the loopback address and is bounded in time."""

    def __init__(self, model: Path, log: Path) -> None:
        self.port = free_port()
        self.model = str(model)
        self.log = log
        options = "--dtype float32 --max-model-len 256 --max-num-seqs 16 --enforce-eager --host 127.0.0.1"
        command = [
            sys.executable,
            "-m",
            "lvllm.cli",
            "serve",
            self.model,
            "--port",
            str(self.port),
            *options.split(),
        ]
        env = environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                if self.request("GET", "/health")[0] == 200:
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"not up after {START_S} s:\n{self.log.read_text()[-4000:]}")

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_S)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            raw = answer.read()
            return answer.status, json.loads(raw) if raw.startswith(b"{") else raw
        finally:
            connection.close()

    def complete(self, prompt: str, tokens: int = 24) -> dict[str, Any]:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        status, answer = self.request("POST", "/v1/completions", body)
        assert status == 200, answer
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    def begin_and_hang_up(self, prompt: str) -> None:
        """Start a streamed completion, read its first bytes, and close the connection."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 200, "stream": True, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_S)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        connection.getresponse().read(64)
        connection.close()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise


@pytest.fixture(scope="module")
def server(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(models("qwen3_moe"), tmp_path_factory.mktemp("serve") / "log.txt")
    try:
        running.wait()
        yield running
    finally:
        running.stop()


def test_completions_equal_stock(server: Server, stock: StockCache) -> None:
    expected = stock("qwen3_moe")["tokens"][0]
    assert server.complete(PROMPT)["token_ids"] == expected
    log = server.log.read_text()
    assert "placement of the MoE layers" in log
    assert "effective configuration" in log


def test_chat(server: Server) -> None:
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    first, second = (server.request("POST", "/v1/chat/completions", body) for _ in range(2))
    assert first[0] == 200, first
    assert first[1]["usage"]["completion_tokens"] == 8
    assert first[1]["choices"][0]["message"] == second[1]["choices"][0]["message"]


def test_sixteen_at_once_with_some_cancelled(server: Server) -> None:
    """Those that stay get what they get alone, and the server answers as before afterwards."""
    prompts = [f"{PROMPT} {n}" for n in range(16)]
    alone = [server.complete(p)["token_ids"] for p in prompts[::4]]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        kept = {p: pool.submit(server.complete, p) for n, p in enumerate(prompts) if n % 4 == 0 or n % 4 == 2}
        cancelled = [pool.submit(server.begin_and_hang_up, p) for n, p in enumerate(prompts) if n % 2]
        for job in cancelled:
            job.result(REQUEST_S)
        together = {p: job.result(REQUEST_S)["token_ids"] for p, job in kept.items()}
    assert [together[p] for p in prompts[::4]] == alone
    assert all(len(tokens) == 24 for tokens in together.values())
    assert server.complete(prompts[0])["token_ids"] == alone[0]
