"""Small projects for each kind of file: what is read, and what is not."""
# ruff: noqa: E501 - small projects as single lines

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import Audit
from lvllm.audit.readers import dispatch, options, shell
from lvllm.audit.values import human_int, index_ranges, scalar


def settings(kind: str, text: str, file: str) -> dict[str, Any]:
    """Settings of the only unit of a text."""
    facts = dispatch.read(kind, text, file, {})
    assert len(facts.units) == 1, [u.launcher for u in facts.units]
    return {k: v.value for k, v in facts.units[0].settings.items()}


def bash(text: str) -> dict[str, Any]:
    return settings("shell", text, "s.sh")


def test_continuation_lines_keep_their_own_line() -> None:
    unit = dispatch.read("shell", "vllm serve m \\\n  --max-num-seqs 8 \\\n  -tp 2\n", "s.sh", {}).units[0]
    assert unit.settings["max_num_seqs"].site.line == 2
    assert unit.settings["tensor_parallel_size"].site.line == 3
    assert unit.settings["model"].site.line == 1


def test_defaults_of_variables_are_defaults() -> None:
    unit = dispatch.read(
        "shell", "vllm serve ${MODEL:-Qwen/Qwen3-8B} -tp ${TP:-4} --port $PORT\n", "s.sh", {}
    ).units[0]
    assert (unit.settings["model"].value, unit.settings["model"].state) == ("Qwen/Qwen3-8B", "default_of")
    assert (unit.settings["tensor_parallel_size"].value, unit.settings["tensor_parallel_size"].state) == (
        4,
        "default_of",
    )
    assert (unit.settings["port"].value, unit.settings["port"].state) == (None, "dynamic")


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("--max-num-batched-tokens 1k", "max_num_batched_tokens", 1000),
        ("--max-num-batched-tokens 1K", "max_num_batched_tokens", 1024),
        ("--max-model-len 25.6k", "max_model_len", 25600),
        ("--max-model-len auto", "max_model_len", -1),
        ("--device-memory-utilization 0.8", "gpu_memory_utilization", 0.8),
        ("--max_num_seqs=7", "max_num_seqs", 7),
        ("--no-enable-prefix-caching", "enable_prefix_caching", False),
        ("-tp 2", "tensor_parallel_size", 2),
        ("-ep", "enable_expert_parallel", True),
        ("-O2", "optimization_level", 2),
        ("-O 1", "optimization_level", 1),
        ("-O=3", "optimization_level", 3),
        ("-cc.mode 3", "compilation_config", {"mode": 3}),
        ("--compilation-config.cudagraph_mode FULL --compilation-config.mode 3", "compilation_config",
         {"cudagraph_mode": "FULL", "mode": 3}),
        ("--speculative-config '{\"method\": \"ngram\"}'", "speculative_config", {"method": "ngram"}),
        ('--speculative-config "{\\"method\\": \\"ngram\\"}"', "speculative_config", {"method": "ngram"}),
        ("--lora-modules a=/x b=/y", "lora_modules", ["a=/x", "b=/y"]),
        ("--cudagraph-capture-sizes 1 2 4", "cudagraph_capture_sizes", [1, 2, 4]),
        ("--max-num-se 9", "max_num_seqs", 9),
    ],
)  # fmt: skip
def test_option_forms(text: str, name: str, value: object) -> None:
    assert bash(f"vllm serve m {text}\n")[name] == value


def test_arrays_and_commands_in_variables() -> None:
    assert bash('A=(--max-num-seqs 8)\nA+=(-tp 2)\nvllm serve m "${A[@]}"\n') == {
        "max_num_seqs": 8, "tensor_parallel_size": 2, "model": "m",
    }  # fmt: skip
    assert bash('CMD="vllm serve m"\nCMD="$CMD --max-num-seqs 8"\neval $CMD\n')["max_num_seqs"] == 8


def test_branches_make_a_value_dynamic() -> None:
    unit = dispatch.read("shell", "if x; then TP=2; else TP=4; fi\nvllm serve m -tp $TP\n", "s.sh", {}).units[
        0
    ]
    assert unit.settings["tensor_parallel_size"].state == "dynamic"


@pytest.mark.parametrize(
    "text",
    [
        "echo vllm serve m\n",
        "# vllm serve m\n",
        "pkill -f 'vllm serve'\n",
        "vllm bench serve --model m\n",
        "vllm --help\n",
    ],
)
def test_what_is_no_launch_line(text: str) -> None:
    assert [u for u in dispatch.read("shell", text, "s.sh", {}).units if u.launcher != "script"] == []


@pytest.mark.parametrize(
    ("text", "launcher"),
    [
        ("python3 -m vllm.entrypoints.openai.api_server --model m", "api_server"),
        ("python -m vllm.entrypoints.api_server --model m", "old api_server"),
        ("python -m vllm.entrypoints.cli.main serve m", "vllm serve"),
        ("trl vllm-serve --model m", "trl vllm-serve"),
        ("swift rollout --model m", "swift rollout"),
        ("lvllm serve m", "lvllm serve"),
        ("nohup env A=b numactl -N 0 uv run vllm serve m &", "vllm serve"),
        ("ssh host 'cd x && vllm serve m'", "vllm serve"),
        ("bash -c \"vllm serve m\"", "vllm serve"),
        ("docker run --gpus all -p 80:80 vllm/vllm-openai:v0.30.0 --model m", "vllm image"),
        ("lm_eval --model vllm --model_args pretrained=m,tensor_parallel_size=2", "lm_eval"),
        ("cat <<EOF > run.sh\nvllm serve m\nEOF", "vllm serve"),
    ],
)  # fmt: skip
def test_launchers(text: str, launcher: str) -> None:
    units = dispatch.read("shell", text + "\n", "s.sh", {}).units
    assert [u.launcher for u in units] == [launcher]
    assert units[0].settings["model"].value == "m"


def test_environment_order() -> None:
    unit = dispatch.read("shell", "export A=1\nexport B=1\nB=2 vllm serve m\nexport A=3\n", "s.sh", {}).units[
        0
    ]
    assert {k: v.value for k, v in unit.env.items()} == {"A": "1", "B": "2"}


def test_powershell_makefile_justfile_procfile() -> None:
    power = "$env:VLLM_PORT = 1\n$model = 'Qwen/Qwen3-8B'\nvllm serve $model `\n  --max-num-seqs 8\n"
    assert settings("powershell", power, "run.ps1") == {"model": "Qwen/Qwen3-8B", "max_num_seqs": 8}
    make = "MODEL ?= Qwen/Qwen3-8B\nserve:\n\t@vllm serve $(MODEL) \\\n\t  --max-num-seqs 8\n"
    assert settings("makefile", make, "Makefile") == {"model": "Qwen/Qwen3-8B", "max_num_seqs": 8}
    just = 'model := "Qwen/Qwen3-8B"\nserve:\n    vllm serve {{model}} -tp 2\n'
    assert settings("justfile", just, "justfile") == {"model": "Qwen/Qwen3-8B", "tensor_parallel_size": 2}
    assert settings("procfile", "web: vllm serve m\n", "Procfile") == {"model": "m"}


def test_dockerfile_forms() -> None:
    exec_form = 'FROM vllm/vllm-openai:v0.30.0\nENTRYPOINT ["vllm", "serve"]\nCMD ["m", "-tp", "2"]\n'
    assert settings("dockerfile", exec_form, "Dockerfile") == {"model": "m", "tensor_parallel_size": 2}
    shell_form = "FROM x\nARG MODEL=m\nENV LEN=8192\nCMD vllm serve $MODEL --max-model-len $LEN\n"
    assert settings("dockerfile", shell_form, "Dockerfile") == {"model": "m", "max_model_len": 8192}
    image = 'FROM vllm/vllm-openai:v0.30.0\nCMD ["--model", "m"]\n'
    assert settings("dockerfile", image, "Dockerfile") == {"model": "m"}


def test_dockerfile_installs_count_as_pins(audit: Audit) -> None:
    run = audit(
        {"Dockerfile": "FROM python:3.12\nRUN pip install --no-cache-dir vllm==0.9.1\nCMD vllm serve m\n"}
    )
    assert run.tree["units"][0]["versions"] == {"vllm": "0.9.1", "source": "pin"}


def test_compose_variables_and_env_file(audit: Audit) -> None:
    run = audit({
        ".env": "LEN=4096\n",
        "vllm.env": "VLLM_USE_V1=0\n",
        "compose.yaml": "services:\n  a:\n    image: vllm/vllm-openai:${TAG:-v0.30.0}\n    env_file: vllm.env\n"
        "    command: [--model, m, --max-model-len, '${LEN}', --max-num-seqs, '${SEQS}']\n",
    })  # fmt: skip
    unit = run.tree["units"][0]
    assert unit["versions"] == {"vllm": "0.30.0", "source": "image tag"}
    assert "A4.v1_off_ignored" in run.rules
    items = {i["id"]: i for i in unit["items"]}
    assert items["B2"]["current"] == "--max-model-len = 4096"


def test_kubernetes_shell_command_and_variables() -> None:
    text = (
        "kind: Pod\nspec:\n  containers:\n  - name: v\n    image: vllm/vllm-openai:v0.30.0\n"
        "    env: [{name: M, value: m}]\n    command: [/bin/sh, -c]\n    args:\n    - |\n"
        "      vllm serve m \\\n        --max-num-seqs 8\n"
    )
    unit = dispatch.read("yaml", text, "p.yaml", {}).units[0]
    assert unit.settings["max_num_seqs"].value == 8
    assert unit.settings["max_num_seqs"].site.line == 11
    plain = "kind: Pod\nspec:\n  containers:\n  - image: vllm/vllm-openai:v1\n    env: [{name: M, value: m}]\n    args: [--model, $(M)]\n"
    assert settings("yaml", plain, "p.yaml") == {"model": "m"}


def test_helm_values() -> None:
    text = (
        "servingEngineSpec:\n  modelSpec:\n  - name: a\n    repository: vllm/vllm-openai\n    tag: v0.30.0\n    modelURL: m\n"
        "    requestCPU: 6\n    requestGPU: 2\n    vllmConfig:\n      maxModelLen: 4096\n      tensorParallelSize: 2\n"
        "      extraArgs: [--disable-log-requests]\n"
    )
    unit = dispatch.read("yaml", text, "values.yaml", {}).units[0]
    assert {k: v.value for k, v in unit.settings.items()} == {
        "model": "m", "max_model_len": 4096, "tensor_parallel_size": 2, "disable_log_requests": True,
    }  # fmt: skip
    assert unit.resources.gpus is not None
    assert unit.resources.gpus.value == 2


def test_notebook_cells(audit: Audit) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["LLM('no')"]},
        {
            "cell_type": "code",
            "source": ["%pip install x\n", "from vllm import LLM\n", "llm = LLM('m', swap_space=4)\n"],
        },
        {"cell_type": "code", "source": ["!vllm serve q --swap-space 4\n"]},
    ]
    run = audit({"n.ipynb": json.dumps({"cells": cells}, indent=1)})
    assert sorted(u["launcher"] for u in run.tree["units"]) == ["LLM", "vllm serve"]
    assert run.rules.count("B4.gone") == 2
    assert all(
        "swap" in e["text"]
        for u in run.tree["units"]
        for i in u["items"]
        if i["id"] == "B4"
        for e in i["evidence"]
    )


@pytest.mark.parametrize(
    "text",
    [
        "import vllm as v\nv.LLM('m', max_num_seqs=8)\n",
        "from vllm import LLM as L\nL(model='m', max_num_seqs=4 * 2)\n",
        "from vllm import LLM\ncfg = {'model': 'm', 'max_num_seqs': 8}\nLLM(**cfg)\n",
        "from vllm import LLM\ncfg = dict(model='m')\ncfg['max_num_seqs'] = 8\nLLM(**cfg)\n",
        "from vllm import LLM\nN = 8\nNAME = f'{\"m\"}'\nLLM(NAME, max_num_seqs=N)\n",
        "from vllm import AsyncEngineArgs, AsyncLLMEngine\na = AsyncEngineArgs(model='m', max_num_seqs=8)\nAsyncLLMEngine.from_engine_args(a)\n",
        "import subprocess\nsubprocess.Popen(['vllm', 'serve', 'm', '--max-num-seqs', '8'])\n",
        "import os\nos.system('vllm serve m --max-num-seqs 8')\n",
        "from langchain_community.llms import VLLM\nVLLM(model='m', vllm_kwargs={'max_num_seqs': 8})\n",
        "from ray.data.llm import vLLMEngineProcessorConfig\nvLLMEngineProcessorConfig(model_source='m', engine_kwargs=dict(max_num_seqs=8))\n",
    ],
)  # fmt: skip
def test_python_forms(text: str) -> None:
    found = settings("python", text, "a.py")
    assert (found["model"], found["max_num_seqs"]) == ("m", 8)


def test_python_defaults_and_unknowns() -> None:
    text = (
        "import argparse, os, torch\nfrom vllm import LLM\np = argparse.ArgumentParser()\n"
        "p.add_argument('--tp', type=int, default=4)\nargs = p.parse_args()\n"
        "LLM(os.environ.get('MODEL', 'm'), tensor_parallel_size=args.tp, max_num_seqs=torch.cuda.device_count())\n"
    )
    unit = dispatch.read("python", text, "a.py", {}).units[0]
    states = {k: (v.value, v.state.value) for k, v in unit.settings.items()}
    assert states == {
        "model": ("m", "default_of"), "tensor_parallel_size": (4, "default_of"), "max_num_seqs": (None, "dynamic"),
    }  # fmt: skip


def test_dynamic_values_make_no_p0(audit: Audit) -> None:
    run = audit({"a.py": "from vllm import LLM\nLLM('Qwen/Qwen3-8B', swap_space=size())\n"})
    assert run.priority("B4.gone") == "P1"
    assert run.tree["summary"]["p0"] == 0


def test_unknown_part_of_a_map_is_not_missing(audit: Audit) -> None:
    run = audit(
        {
            "a.py": "from vllm import LLM\nLLM('Qwen/Qwen3-8B', speculative_config={'method': 'eagle3', 'model': head})\n"
        }
    )
    assert "G1.valid" in run.rules


def test_documents_are_examples(audit: Audit) -> None:
    text = "# Use\n\n```bash\n$ vllm serve Qwen/Qwen3-8B --swap-space 4\n```\n"
    run = audit({"README.md": text})
    assert run.priority("B4.gone") == "P1"
    both = audit({"README.md": text, "s.sh": "vllm serve Qwen/Qwen3-8B\n"})
    assert [u["id"] for u in both.tree["units"]] == ["s.sh:1"]
    rst = "Use\n\n.. code-block:: bash\n\n   vllm serve Qwen/Qwen3-8B --swap-space 4\n"
    assert "B4.gone" in audit({"README.rst": rst}).rules


@pytest.mark.parametrize(
    ("file", "text", "version", "source"),
    [
        ("requirements-gpu.txt", "vllm==0.30.1  # pinned\n", "0.30.1", "pin"),
        ("requirements.txt", "vllm[audio]>=0.20,<0.40\n", "0.20", "lower bound"),
        ("pyproject.toml", '[project]\ndependencies = ["vllm==0.30.1"]\n', "0.30.1", "pin"),
        ("pyproject.toml", '[tool.poetry.dependencies]\nvllm = "^0.30.1"\n', "0.30.1", "lower bound"),
        ("uv.lock", '[[package]]\nname = "vllm"\nversion = "0.30.1"\n', "0.30.1", "lock file"),
        ("poetry.lock", '[[package]]\nname = "vllm"\nversion = "0.30.1"\n', "0.30.1", "lock file"),
        ("Pipfile.lock", '{"default": {"vllm": {"version": "==0.30.1"}}}', "0.30.1", "lock file"),
        ("Pipfile", '[packages]\nvllm = "==0.30.1"\n', "0.30.1", "pin"),
        ("setup.cfg", "[options]\ninstall_requires =\n    vllm==0.30.1\n", "0.30.1", "pin"),
        ("environment.yml", "dependencies:\n  - python=3.12\n  - pip:\n    - vllm==0.30.1\n", "0.30.1", "pin"),
        ("constraints.txt", "vllm==0.30.1\n", "0.30.1", "pin"),
    ],
)  # fmt: skip
def test_dependency_files(file: str, text: str, version: str, source: str, audit: Audit) -> None:
    run = audit({"s.sh": "vllm serve m\n", file: text})
    assert run.tree["units"][0]["versions"] == {"vllm": version, "source": source}


def test_lock_wins_over_pin_and_option_over_all(audit: Audit) -> None:
    files = {"s.sh": "vllm serve m\n", "requirements.txt": "vllm==0.20.0\n",
             "uv.lock": '[[package]]\nname = "vllm"\nversion = "0.21.0"\n'}  # fmt: skip
    assert audit(files).tree["units"][0]["versions"]["vllm"] == "0.21.0"
    given = audit(files, "--vllm-version", "0.22.0").tree["units"][0]["versions"]
    assert given == {"vllm": "0.22.0", "source": "given"}


def test_a_wrapper_gives_its_environment(audit: Audit) -> None:
    run = audit({
        "compose.yaml": "services:\n  a:\n    image: me/x:1\n    environment: {VLLM_USE_V1: '0'}\n    command: bash /app/start.sh\n",
        "app/start.sh": "vllm serve m\n",
    })  # fmt: skip
    assert [u["id"] for u in run.tree["units"]] == ["app/start.sh:1"]
    assert "A4.v1_off_ignored" in run.rules


def test_two_services_on_one_gpu(audit: Audit) -> None:
    def service(name: str, gpu: str) -> str:
        return (
            f"  {name}:\n    image: vllm/vllm-openai:v0.33.0\n    command: --model Qwen/Qwen3-8B --port {len(name)}\n"
            f"    deploy: {{resources: {{reservations: {{devices: [{{device_ids: ['{gpu}'], capabilities: [gpu]}}]}}}}}}\n"
        )

    run = audit({"compose.yaml": "services:\n" + service("a", "0") + service("bb", "0")})
    assert run.rules.count("B1.shared_gpus") == 2
    run = audit({"compose.yaml": "services:\n" + service("a", "0") + service("bb", "1")})
    assert "B1.shared_gpus" not in run.rules


def test_configuration_false_lines(audit: Audit) -> None:
    yaml = "enable-prefix-caching: false\nenforce-eager: false\ncompilation-config:\n  cudagraph_mode: NONE\n"
    run = audit({"s.sh": "vllm serve Qwen/Qwen3-8B --config c.yaml\n", "c.yaml": yaml})
    assert run.priority("X7.dropped") == "P0"
    assert run.priority("X7.harmless") == "P2"
    dropped = next(a for a in run.tree["advisories"] if a["rule"] == "X7.dropped")
    assert dropped["evidence"][0]["line"] == 1
    # The line is not passed on, so prefix caching stays on; nested values are.
    assert "E4.ok" in run.rules
    assert "A2.mode_none" in run.rules
    assert run.code == 1


def test_configuration_of_the_api_server_module(audit: Audit) -> None:
    """Its parser has the options itself, so a dashed `false` line is passed on as --no-…"""
    yaml = "model: Qwen/Qwen3-8B\nenable-prefix-caching: false\nenable_chunked_prefill: false\n"
    run = audit({"s.sh": "python -m vllm.entrypoints.openai.api_server --config c.yaml\n", "c.yaml": yaml})
    assert "E4.off" in run.rules
    dropped = [a["evidence"][0]["line"] for a in run.tree["advisories"] if a["rule"] == "X7.dropped"]
    assert dropped == [3]


def test_model_folder(audit: Audit) -> None:
    config = {"model_type": "qwen3_moe", "num_experts": 128, "num_hidden_layers": 48, "hidden_size": 2048,
              "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
              "max_position_embeddings": 40960, "quantization_config": {"quant_method": "fp8"}}  # fmt: skip
    index = {"metadata": {"total_size": 31 * 2**30}, "weight_map": {}}
    run = audit({"s.sh": "vllm serve ./models/m\n", "models/m/config.json": json.dumps(config),
                 "models/m/model.safetensors.index.json": json.dumps(index)})  # fmt: skip
    model = run.tree["units"][0]["model"]
    assert model["source"] == "config.json"
    assert (model["moe"], model["experts"], model["quantized"], model["weights_gib"]) == (
        True,
        128,
        "fp8",
        31.0,
    )


def test_guessed_hardware_makes_no_p0(audit: Audit) -> None:
    """A GPU in a file name or a comment is a guess; given on the command line it is not."""
    big = "vllm serve meta-llama/Llama-3.3-70B-Instruct --max-model-len 8192\n"
    named = audit({"serve_h100.sh": big})
    assert named.priority("C1.does_not_fit") == "P1"
    commented = audit({"s.sh": f"# runs on 1x A100\n{big}"})
    assert commented.priority("C1.does_not_fit") == "P1"
    assert commented.tree["units"][0]["hardware"]["source"] == "comment s.sh:1"
    assert audit({"s.sh": big}, "--gpu", "H100:1").priority("C1.does_not_fit") == "P0"
    assert "C1.does_not_fit" not in audit({"s.sh": big}).rules


def test_compose_service_built_from_a_dockerfile(audit: Audit) -> None:
    compose = "services:\n  a:\n    build: ./server\n    ports: ['8000:8000']\n"
    docker = 'FROM python:3.12\nENV VLLM_USE_V1=0\nCMD ["vllm", "serve", "Qwen/Qwen3-8B"]\n'
    run = audit({"compose.yaml": compose, "server/Dockerfile": docker})
    assert [u["id"] for u in run.tree["units"]] == ["server/Dockerfile:3"]
    assert {"A4.v1_off_ignored", "I5.open"} <= set(run.rules)
    own = compose + "    command: vllm serve Qwen/Qwen3-4B\n"
    run = audit({"compose.yaml": own, "server/Dockerfile": docker})
    assert run.rules.count("A4.v1_off_ignored") == 2


def test_single_values() -> None:
    assert [human_int(t) for t in ("1k", "1K", "25.6k", "2.5K", "2M", "x")] == [
        1000,
        1024,
        25600,
        None,
        2**21,
        None,
    ]
    assert scalar("NONE") == "NONE"
    assert scalar("{'a': 1}") == {"a": 1}
    assert index_ranges("0-3,8") == [(0, 3), (8, 8)]
    assert index_ranges("0-x") is None


def test_words_of_a_shell_string() -> None:
    command = shell.parse("""x 'a b' "c $D" e\\ f $'g\\n' """).commands[0]
    assert [w.value for w in command.words[:4]] == ["x", "a b", "c $D", "e f"]
    parsed = options.parse(command.words, "f", "o", strict=False)
    assert len(parsed.positional) == 5
