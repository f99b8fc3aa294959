"""H. RL, I. serving, J. environment, X. advisories."""
# ruff: noqa: E501 - one project per line reads better than wrapped ones

from cases import Case, Files, case, llm, rl, serve, trl

Q = "Qwen/Qwen3-8B"
COLOCATE = "vllm_mode='colocate', vllm_enable_sleep_mode=True, vllm_gpu_memory_utilization=0.4"
SERVER = "vllm_mode='server'"
SLEEP = "enable_sleep_mode=True"


def pair(server_env: str, trainer_env: str, server: str = "", trainer: str = SERVER) -> Files:
    """A trainer and its server."""
    files = trl(trainer)
    files["train.py"] = f"import os\n{trainer_env}\n{files['train.py']}"
    files["serve.sh"] = f"{server_env}\nvllm serve Qwen/Qwen2.5-7B-Instruct {server}\n"
    return files


def pod(container: str, more: str = "") -> Files:
    indented = "".join(f"      {line}\n" for line in container.splitlines())
    return {"pod.yaml": f"kind: Pod\nspec:\n  containers:\n    - name: v\n{indented}{more}"}


SCRIPT: Files = {
    "loop.py": "import requests\nfrom vllm import AsyncEngineArgs\nfrom fastapi import FastAPI\napp = FastAPI()\n"
    "args = AsyncEngineArgs(model='Qwen/Qwen3-8B', weight_transfer_config={'backend': 'nccl'})\n"
}

CASES: list[Case] = [
    case("H1.off_high", trl("vllm_mode='colocate', vllm_gpu_memory_utilization=0.8"), trl(COLOCATE)),
    case("H1.off", trl("vllm_mode='colocate'"), trl(COLOCATE)),
    case("H1.level2_no_sync", rl(SLEEP, "llm.generate(b); llm.sleep(level=2); llm.wake_up()"),
         rl(SLEEP, "llm.generate(b); llm.sleep(level=2); llm.wake_up(); llm.collective_rpc('load')")),
    case("H1.not_enabled", rl("", "llm.generate(b); llm.sleep(level=1); llm.wake_up()"),
         rl(SLEEP, "llm.generate(b); llm.sleep(level=1); llm.wake_up()")),
    case("H1.on", trl(COLOCATE)),
    case("H1.server", trl(SERVER)),
    case("H1.not_rl", serve(Q)),
    case("H2.by_disk",
         {"t.py": SCRIPT["loop.py"] + "def f():\n    model.save_pretrained('x')\n    optimizer.step()\n"},
         {"t.py": SCRIPT["loop.py"] + "def f():\n    model.save_pretrained('x')\n    optimizer.step()\n    engine.update_weights(w)\n"}),
    case("H2.ipc_apart", serve(f"{Q} --nnodes 2 --weight-transfer-config '{{\"backend\": \"ipc\"}}'"),
         serve(f"{Q} --nnodes 2 --weight-transfer-config '{{\"backend\": \"nccl\"}}'")),
    case("H2.gloo", {"t.sh": "python -m openrlhf.cli.train_ppo_ray --vllm.num_engines 2 --vllm.sync_backend gloo\n"},
         {"t.sh": "python -m openrlhf.cli.train_ppo_ray --vllm.num_engines 2 --vllm.sync_backend nccl\n"}),
    case("H2.ok", trl(COLOCATE)),
    case("H2.not_rl", serve(Q)),
    case("H3.over", trl("vllm_mode='colocate', vllm_gpu_memory_utilization=0.45, trainer_gpu_memory_fraction=0.6"),
         trl("vllm_mode='colocate', vllm_gpu_memory_utilization=0.3, trainer_gpu_memory_fraction=0.6")),
    case("H3.eager", trl("vllm_mode='colocate', vllm_enforce_eager=True"), trl(COLOCATE + ", vllm_enforce_eager=True")),
    case("H3.ok", trl(COLOCATE)),
    case("H3.server", trl(SERVER)),
    case("H3.not_rl", serve(Q)),
    case("H4.shared", pair("export CUDA_VISIBLE_DEVICES=0", "os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'"),
         pair("export CUDA_VISIBLE_DEVICES=2", "os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'")),
    case("H4.no_address", {"t.sh": "accelerate launch --num_machines 2 grpo.py --use_vllm True --vllm_mode server\n"},
         {"t.sh": "accelerate launch --num_machines 2 grpo.py --use_vllm True --vllm_mode server --vllm_server_host h\n"}),
    case("H4.ok", trl(SERVER)),
    case("H4.colocate", trl(COLOCATE)),
    case("H4.not_rl", serve(Q)),
    case("H5.no_pause", {"t.py": SCRIPT["loop.py"] + "engine.update_weights(w)\n"},
         {"t.py": SCRIPT["loop.py"] + "engine.pause_generation()\nengine.update_weights(w)\n"}),
    case("H5.on", {"t.sh": "swift rlhf --use_vllm true --vllm_mode server --async_generate true\n"}),
    case("H5.worth", trl(SERVER), trl(SERVER), "--gpu A100-80:16", "--gpu A100-80:8"),
    case("H5.off", trl(SERVER)),
    case("H5.not_rl", serve(Q)),
    case("H6.full_sync",
         {"t.py": SCRIPT["loop.py"] + "cfg = LoraConfig(r=16)\nengine.pause_generation()\nengine.update_weights(w)\n"},
         {"t.py": SCRIPT["loop.py"] + "cfg = LoraConfig(r=16)\nrequests.post(u + '/v1/load_lora_adapter')\n"}),
    case("H6.not_allowed",
         {**serve(f"{Q} --enable-lora --weight-transfer-config '{{\"backend\": \"nccl\"}}'"),
          "c.py": "import requests\nrequests.post(url + '/v1/load_lora_adapter')\n"},
         {**serve(f"{Q} --enable-lora --weight-transfer-config '{{\"backend\": \"nccl\"}}' --host 127.0.0.1",
                  "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
          "c.py": "import requests\nrequests.post(url + '/v1/load_lora_adapter')\n"}),
    case("H6.api_servers",
         serve(f"{Q} --enable-lora --api-server-count 2 --weight-transfer-config.backend nccl", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
         serve(f"{Q} --enable-lora --api-server-count 1 --weight-transfer-config.backend nccl", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")),
    case("H6.rank", {"t.sh": "swift rlhf --use_vllm true --vllm_mode colocate --train_type lora --lora_rank 64 --vllm_max_lora_rank 16\n"},
         {"t.sh": "swift rlhf --use_vllm true --vllm_mode colocate --train_type lora --lora_rank 16 --vllm_max_lora_rank 16\n"}),
    case("H6.ok", {"t.sh": "swift rlhf --use_vllm true --vllm_mode colocate --train_type lora --lora_rank 8\n"}),
    case("H6.none", trl(COLOCATE)),
    case("H6.not_rl", serve(Q)),
    case("H7.online", {"t.sh": "swift rlhf --use_vllm true --vllm_mode colocate --model Qwen/Qwen3-8B --vllm_quantization fp8_per_block\n"}),
    case("H7.four_bit", {"t.sh": "swift rlhf --use_vllm true --vllm_mode colocate --model Qwen/Qwen3-8B-AWQ\n"},
         {"t.sh": "swift rlhf --use_vllm true --vllm_mode colocate --model Qwen/Qwen3-8B\n"}),
    case("H7.excluded", trl(COLOCATE, requirements="trl==1.16.0\nvllm==0.33.0\n"), trl(COLOCATE)),
    case("H7.range", trl(COLOCATE, requirements="trl==1.16.0\nvllm>=0.32\n"), trl(COLOCATE, requirements="trl==1.16.0\nvllm>=0.25\n")),
    case("H7.ok", trl(COLOCATE)),
    case("H7.not_rl", serve(Q)),
    case("I1.not_enabled", serve(f"{Q} --lora-modules a=/a"), serve(f"{Q} --enable-lora --lora-modules a=/a")),
    case("I1.gone", serve(f"{Q} --enable-lora --enable-lora-bias"), serve(f"{Q} --enable-lora")),
    case("I1.too_many", serve(f"{Q} --enable-lora --lora-modules a=/a b=/b"), serve(f"{Q} --enable-lora --max-loras 2 --lora-modules a=/a b=/b")),
    case("I1.copies", {"s.sh": f"vllm serve {Q} --port 1\nvllm serve {Q} --port 2\n"},
         {"s.sh": f"vllm serve {Q} --port 1\nvllm serve Qwen/Qwen3-4B --port 2\n"}),
    case("I1.none", serve(Q)),
    case("I1.not_serve", llm(f"'{Q}'")),
    case("I1.ok", serve(f"{Q} --enable-lora --lora-modules a=/a")),
    case("I2.runtime_lora", serve(f"{Q} --enable-lora -asc 4", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"), serve(f"{Q} --enable-lora -asc 4")),
    case("I2.rust", serve(f"{Q} -asc 4", "VLLM_USE_RUST_FRONTEND=1"), serve(Q, "VLLM_USE_RUST_FRONTEND=1")),
    case("I2.too_many", serve(f"{Q} -asc 8"), serve(f"{Q} -asc 2"), "--cores 6"),
    case("I2.worth", {**serve(Q), "b.sh": "vllm bench serve --request-rate 50\n"}, {**serve(Q), "b.sh": "vllm bench serve --request-rate 1\n"}),
    case("I2.not_serve", llm(f"'{Q}'")),
    case("I2.ok", serve(Q)),
    case("I3.no_role", serve(f"{Q} --kv-transfer-config '{{\"kv_connector\": \"NixlConnector\"}}'"),
         serve(f"{Q} --kv-transfer-config '{{\"kv_connector\": \"NixlConnector\", \"kv_role\": \"kv_both\"}}'")),
    case("I3.one_sided", serve(f"{Q} --kv-transfer-config '{{\"kv_connector\": \"NixlConnector\", \"kv_role\": \"kv_producer\"}}'"),
         {"s.sh": "".join(f"vllm serve {Q} --port {p} --kv-transfer-config "
                          f"'{{\"kv_connector\": \"NixlConnector\", \"kv_role\": \"{r}\"}}'\n"
                          for p, r in ((1, "kv_producer"), (2, "kv_consumer")))}),
    case("I3.worth", serve(f"{Q} --nnodes 2"), serve(Q), "--goal latency"),
    case("I3.off", serve(Q)),
    case("I3.not_serve", llm(f"'{Q}'")),
    case("I3.ok", serve(f"{Q} --kv-transfer-config '{{\"kv_connector\": \"NixlConnector\", \"kv_role\": \"kv_both\"}}'")),
    case("I4.conflict", serve(f"{Q} --config c.yaml --max-num-seqs 8", c__yaml="max-num-seqs: 16\n"),
         serve(f"{Q} --config c.yaml --max-num-seqs 16", c__yaml="max-num-seqs: 16\n")),
    case("I4.repeated",
         {"s.sh": "".join(f"vllm serve m{i} -tp 2 --dtype auto --seed 1 --max-model-len 8192 --max-num-seqs 128 --port 80 "
                          "--host 127.0.0.1 --max-num-batched-tokens 8192 --gpu-memory-utilization 0.9 --enable-lora "
                          "--max-loras 2 --max-lora-rank 32 --trust-remote-code\n" for i in (1, 2))},
         {"s.sh": "vllm serve m1 -tp 2 --dtype auto\nvllm serve m2 -tp 2 --dtype auto\n"}),
    case("I4.not_serve", llm(f"'{Q}'")),
    case("I4.ok", serve(Q)),
    case("I5.control", serve(f"{Q} --host 0.0.0.0", "VLLM_SERVER_DEV_MODE=1"), serve(f"{Q} --host 127.0.0.1", "VLLM_SERVER_DEV_MODE=1")),
    case("I5.multimodal", serve("Qwen/Qwen2.5-VL-7B-Instruct"), serve("Qwen/Qwen2.5-VL-7B-Instruct --limit-mm-per-prompt '{\"image\": 2}'")),
    case("I5.trust", serve(f"{Q} --host 0.0.0.0 --api-key $KEY --trust-request-chat-template"),
         serve(f"{Q} --host 127.0.0.1 --trust-request-chat-template")),
    case("I5.open", serve(f"{Q} --host 0.0.0.0"), serve(f"{Q} --host 0.0.0.0 --api-key $KEY")),
    case("I5.not_serve", llm(f"'{Q}'")),
    case("I5.ok", serve(Q)),
    case("J1.no_package", serve(Q, "VLLM_USE_FASTOKENS=1"), serve(Q, "VLLM_USE_FASTOKENS=1", requirements__txt="fastokens>=0.2.0\n")),
    case("J1.ignored", serve(Q, "VLLM_USE_FASTOKENS=1"), serve(Q), "--vllm-version 0.21.0"),
    case("J1.worth", serve("Qwen/Qwen3-30B-A3B-Instruct-2507 --max-model-len 131072"), serve(f"{Q} --max-model-len 8192")),
    case("J1.on", serve(Q, "VLLM_USE_FASTOKENS=1", requirements__txt="fastokens>=0.2.0\n")),
    case("J1.off", serve(Q)),
    case("J2.half", serve(f"{Q} -asc 4"), serve(f"{Q} -asc 4"), "--cores 2", "--cores 4"),
    case("J2.few", serve(f"{Q} -asc 4"), serve(f"{Q} -asc 4"), "--cores 4", "--cores 6"),
    case("J2.unknown", serve(Q)),
    case("J2.see_k2", serve("Qwen/Qwen3-30B-A3B", "LVLLM_MOE_NUMA_ENABLED=1 LK_THREADS=64"),
         serve("Qwen/Qwen3-30B-A3B", "LVLLM_MOE_NUMA_ENABLED=1 LK_THREADS=8"), "--cores 8"),
    case("J2.ok", serve(Q), None, "--cores 16"),
    case("J3.invalid", serve(Q, "VLLM_WORKER_MULTIPROC_METHOD=thread"), serve(Q, "VLLM_WORKER_MULTIPROC_METHOD=spawn")),
    case("J3.cuda_first", llm(f"'{Q}'", "os.environ['VLLM_WORKER_MULTIPROC_METHOD'] = 'fork'\ntorch.cuda.set_device(0)"),
         llm(f"'{Q}'", "os.environ['VLLM_WORKER_MULTIPROC_METHOD'] = 'fork'")),
    case("J3.no_guard",
         {"r.py": f"import os\nfrom vllm import LLM\nos.environ['VLLM_WORKER_MULTIPROC_METHOD'] = 'spawn'\nllm = LLM('{Q}', tensor_parallel_size=2)\n"},
         llm(f"'{Q}', tensor_parallel_size=2", "os.environ['VLLM_WORKER_MULTIPROC_METHOD'] = 'spawn'")),
    case("J3.ok", serve(Q)),
    case("J4.needed", pair("", ""), pair("export VLLM_SERVER_DEV_MODE=1", "", "--host 127.0.0.1")),
    case("J4.exposed", serve(f"{Q} --host 0.0.0.0", "VLLM_SERVER_DEV_MODE=1"), serve(f"{Q} --host 127.0.0.1", "VLLM_SERVER_DEV_MODE=1")),
    case("J4.not_needed", serve(f"{Q} --host 127.0.0.1", "VLLM_SERVER_DEV_MODE=1"), serve(Q)),
    case("J4.not_serve", llm(f"'{Q}'")),
    case("J4.ok", serve(Q)),
    case("J5.set", serve(Q, "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"), serve(Q)),
    case("J6.watch", serve(Q), {**serve(Q), "m.yaml": "kind: ServiceMonitor\n"}),
    case("X1.latest", pod("image: vllm/vllm-openai:latest\nargs: [--model, x]"), pod("image: vllm/vllm-openai:v0.33.0\nargs: [--model, x]")),
    case("X2.literal", serve(Q, "HF_TOKEN=hf_abcdefghijklmnopqrstu"), serve(Q, "HF_TOKEN=$HF_TOKEN_FILE")),
    case("X3.refused", serve(f"{Q} --fail-on-environ-validation", "VLLM_FOO_BAR=1"), serve(Q, "VLLM_FOO_BAR=1")),
    case("X3.unknown", serve(Q, "VLLM_FOO_BAR=1"), serve(Q, "VLLM_PORT=1")),
    case("X3.hybrid_refused", serve(Q, "LVLLM_MOE_NUMA_ENABLED=1 LVLLM_FOO=1"), serve(Q, "LVLLM_MOE_NUMA_ENABLED=1")),
    case("X3.hybrid_unknown", serve(Q, "LVLLM_FOO=1"), serve(Q)),
    case("X4.gone", serve(f"{Q} --rope-scaling x"), serve(f"{Q} --hf-overrides '{{}}'")),
    case("X4.going", serve(f"{Q} --rope-scaling x"), serve(Q), "--vllm-version 0.10.0"),
    case("X4.env_gone", serve(Q, "VLLM_RPC_TIMEOUT=1"), serve(Q)),
    case("X4.misspelt", serve(f"{Q} --max-model-lenn 10"), serve(f"{Q} --max-model-le 10")),
    case("X4.unknown", serve(f"{Q} --entirely-made-up 1"), serve(Q)),
    case("X4.renamed", {"c.yaml": "use_vllm: true\nvllm_device: auto\n"}, {"c.yaml": "use_vllm: true\nvllm_mode: server\n"}),
    case("X5.deprecated", serve(f"{Q} --disable-cascade-attn"), serve(Q)),
    case("X6.too_old", serve(Q), serve(Q), "--gpu V100:1", "--gpu T4:1"),
    case("X7.dropped", serve(f"{Q} --config c.yaml", c__yaml="enable-prefix-caching: false\n"),
         serve(f"{Q} --config c.yaml", c__yaml="no-enable-prefix-caching: true\n")),
    case("X7.not_read", serve(f"{Q} --config=c.yaml", c__yaml="max-num-seqs: 4\n"), serve(f"{Q} --config c.yaml", c__yaml="max-num-seqs: 4\n")),
    case("X7.harmless", serve(f"{Q} --config c.yaml", c__yaml="enforce-eager: false\n"), serve(f"{Q} --config c.yaml", c__yaml="enforce-eager: true\n")),
]
