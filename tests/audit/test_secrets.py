"""Secrets are masked in every output, and literal ones are reported."""
# ruff: noqa: E501 - small projects as single lines

from __future__ import annotations

import pytest
from conftest import Audit
from lvllm.audit.secrets import Vault, secret_name

HF = "hf_AbCdEfGhIjKlMnOpQrStUv"
SK = "sk-proj-0123456789abcdefghijklmn"
HEX = "0123456789abcdef0123456789abcdef"
PLAIN = "correct-horse-battery"

PROJECTS = {
    "option": {"s.sh": f"vllm serve Qwen/Qwen3-8B --host 0.0.0.0 --api-key {PLAIN} --swap-space 4\n"},
    "inline": {"s.sh": f"VLLM_API_KEY={PLAIN} HF_TOKEN={HF} vllm serve Qwen/Qwen3-8B --swap-space 4\n"},
    "export": {"s.sh": f"export MY_SECRET='{PLAIN}'\nexport DB_PASSWORD={PLAIN}\nvllm serve Qwen/Qwen3-8B --swap-space 4\n"},
    "env file": {".env": f"OPENAI_API_KEY={SK}\nHF_TOKEN={HF}\n", "s.sh": "source .env\nvllm serve Qwen/Qwen3-8B --swap-space 4\n"},
    "compose": {"compose.yaml": "services:\n  a:\n    image: vllm/vllm-openai:v0.33.0\n    environment:\n"
                f"      - HF_TOKEN={HF}\n      - X_PASSWORD={PLAIN}\n    command: --model Qwen/Qwen3-8B --api-key {PLAIN} --swap-space 4\n"},
    "kubernetes": {"p.yaml": "kind: Pod\nspec:\n  containers:\n  - image: vllm/vllm-openai:v0.33.0\n    env:\n"
                   f"    - name: HF_TOKEN\n      value: {PLAIN}\n    args: [--model, Qwen/Qwen3-8B, --swap-space, '4', --api-key, {PLAIN}]\n"},
    "python": {"a.py": f"import os\nfrom vllm import LLM\nos.environ['HF_TOKEN'] = '{HF}'\nLLM('Qwen/Qwen3-8B', hf_token='{HF}', swap_space=4)\n"},
    "yaml config": {"s.sh": "vllm serve Qwen/Qwen3-8B --config c.yaml\n", "c.yaml": f"api-key: {PLAIN}\nswap-space: 4\nuse-x: false\n"},
    "conflict": {"s.sh": f"vllm serve Qwen/Qwen3-8B --config c.yaml --api-key {PLAIN}2 --swap-space 4\n", "c.yaml": f"api-key: {PLAIN}1\n"},
    "shaped in a model path": {"s.sh": f"vllm serve Qwen/Qwen3-8B --swap-space 4 --served-model-name {HEX} --revision {SK}\n"},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PROJECTS))
@pytest.mark.parametrize("format", ["json", "md"])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_no_secret_in_any_output(name: str, format: str, lang: str, audit: Audit) -> None:
    run = audit(PROJECTS[name], "--lang", lang, format=format)
    assert "B4" in run.text
    for secret in (HF, SK, HEX, PLAIN):
        assert secret not in run.text
        assert secret not in run.error
    assert "***" in run.text


def test_literal_secrets_are_reported(audit: Audit) -> None:
    run = audit({"s.sh": f"export HF_TOKEN={HF}\nvllm serve Qwen/Qwen3-8B\n"})
    found = next(a for a in run.tree["advisories"] if a["id"] == "X2")
    assert found["evidence"] == [{"file": "s.sh", "line": 1, "text": "export HF_TOKEN=***"}]
    assert run.priority("X2.literal") == "P1"


@pytest.mark.parametrize(
    "value", ["EMPTY", "<your token>", "$TOKEN", "${TOKEN:-}", "your-token-here", "changeme"]
)
def test_placeholders_are_no_secrets(value: str, audit: Audit) -> None:
    assert "X2.literal" not in audit({"s.sh": f"export HF_TOKEN='{value}'\nvllm serve Qwen/Qwen3-8B\n"}).rules


def test_untracked_files_are_not_reported(audit: Audit) -> None:
    index = b"DIRC\0\0\0\2\0\0\0\1" + b"\0" * 62 + b"s.sh\0"
    files = {".git/index": index, ".env": f"HF_TOKEN={HF}\n", "s.sh": "vllm serve Qwen/Qwen3-8B\n"}
    assert "X2.literal" not in audit(files).rules
    assert "X2.literal" in audit({k: v for k, v in files.items() if k != ".git/index"}).rules


@pytest.mark.parametrize(
    ("name", "secret"),
    [("HF_TOKEN", True), ("--api-key", True), ("api_key", True), ("MY_SECRET_X", True), ("DB_PASSWORD", True),
     ("max_tokens", False), ("--max-num-batched-tokens", False), ("tokenizer", False), ("VLLM_USE_FASTOKENS", False),
     ("long_prefill_token_threshold", False), ("LK_GPU_PREFILL_MIN_TOKENS", False), ("fp8_per_token_head", False)],
)  # fmt: skip
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert secret_name(name) is secret


def test_prose_is_left_alone() -> None:
    vault = Vault()
    for text in ("Set VLLM_API_KEY, put a proxy in front", "one token, and then another", "--tokenizer x", "token budget 4096",
                 "--max-num-batched-tokens 4096", "HF_TOKEN=$HF_TOKEN", "api_key: ${KEY}"):  # fmt: skip
        assert vault.mask(text) == text
    vault.learn(PLAIN)
    assert vault.mask(f"x {PLAIN} y") == "x *** y"
