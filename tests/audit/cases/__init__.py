"""One small project per rule row, and one that is nearly the same and must not give the row."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

Files = dict[str, str]


@dataclass(frozen=True)
class Case:
    """`files` must give `rule`, `without` must not; both with the same arguments."""

    rule: str
    files: Files
    without: Files | None
    args: tuple[str, ...] = ()
    without_args: tuple[str, ...] | None = None


def serve(command: str, env: str = "", **more: str) -> Files:
    """A script with one launch line; `env` are exports, `more` are further files (``__`` = ``.``)."""
    exports = "".join(f"export {word}\n" for word in shlex.split(env))
    quoted = "".join(f"export {w.partition('=')[0]}='{w.partition('=')[2]}'\n" for w in shlex.split(env))
    del exports
    files = {"serve.sh": f"#!/bin/bash\n{quoted}vllm serve {command}\n"}
    files.update({name.replace("__", "."): text for name, text in more.items()})
    return files


def llm(arguments: str, before: str = "", after: str = "llm.generate(['x'])") -> Files:
    """A module that makes one engine under a main guard."""
    return {
        "run.py": f"import os, torch\nfrom vllm import LLM, SamplingParams\n{before}\n"
        f"if __name__ == '__main__':\n    llm = LLM({arguments})\n    {after}\n"
    }


def trl(arguments: str, more: str = "", requirements: str = "trl==1.16.0\nvllm==0.31.0\n") -> Files:
    """A GRPO training module."""
    return {
        "train.py": f"from trl import GRPOConfig, GRPOTrainer\nc = GRPOConfig(use_vllm=True, {arguments})\n"
        f"GRPOTrainer(model='Qwen/Qwen2.5-7B-Instruct', args=c)\n{more}\n",
        "requirements.txt": requirements,
    }


def rl(engine: str, loop: str) -> Files:
    """Own training code with an engine in the same process."""
    body = "\n    ".join(loop.split("; "))
    return {
        "train.py": f"from vllm import LLM\nllm = LLM('Qwen/Qwen3-8B', {engine})\n"
        f"for batch in data:\n    {body}\n    optimizer.step()\n"
    }


def case(
    rule: str, files: Files, without: Files | None = None, args: str = "", without_args: str | None = None
) -> Case:
    """A case; `args` as one shell string."""
    other = None if without_args is None else tuple(shlex.split(without_args))
    return Case(rule, files, without, tuple(shlex.split(args)), other)
