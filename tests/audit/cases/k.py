"""K. Hybrid CPU/GPU MoE."""
# ruff: noqa: E501 - one project per line reads better than wrapped ones

from cases import Case, Files, case, serve

M = "Qwen/Qwen3-30B-A3B"
ON = "LVLLM_MOE_NUMA_ENABLED=1"
GOOD = f"{M} --max-model-len 8192 --max-num-seqs 4 --max-num-batched-tokens 16384"


def on(env: str = "", options: str = GOOD, **more: str) -> Files:
    return serve(options, f"{ON} {env}", **more)


def service(lines: str, command: str = f"/usr/bin/vllm serve {GOOD}") -> Files:
    return {"v.service": f"[Service]\nEnvironment={ON}\n{lines}\nExecStart={command}\n"}


def compose(lines: str) -> Files:
    body = "".join(f"    {line}\n" for line in lines.splitlines())
    return {
        "compose.yaml": f"services:\n  v:\n    image: vllm/vllm-openai:v0.33.0\n    environment:\n      {ON.replace('=', ': ')}\n"
        f"    command: --model {GOOD}\n{body}"
    }


CONFIG = '{"num_experts": 128, "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "model_type": "qwen3_moe"}'
TWO = "--gpu 'RTX 3090:2'"
MIXED = "--gpu 'RTX 3090:1,RTX 5060 Ti:1'"

CASES: list[Case] = [
    case("K1.invalid", serve(GOOD, "LVLLM_MOE_NUMA_ENABLED=maybe"), on()),
    case("K1.ignored", serve(GOOD, "LK_THREADS=8"), on("LK_THREADS=8")),
    case("K1.dense", serve("Qwen/Qwen3-8B", ON), on()),
    case("K1.too_big", serve("deepseek-ai/DeepSeek-V3"), serve("deepseek-ai/DeepSeek-V3"), "--gpu 'RTX 3090:1' --ram 1024",
         "--gpu 'RTX 3090:1' --ram 256"),
    case("K1.on", on()),
    case("K1.off", serve(GOOD, "LVLLM_MOE_NUMA_ENABLED=0")),
    case("K2.invalid", on("LK_THREADS=many"), on("LK_THREADS=auto")),
    case("K2.logical", on("LK_THREADS=32"), on("LK_THREADS=16"), "--cores 16"),
    case("K2.too_many", on("LK_THREADS=20"), on("LK_THREADS=16"), "--cores 16"),
    case("K2.good", on("LK_THREADS=15"), on("LK_THREADS=12"), "--cores 16"),
    case("K2.few", on("LK_THREADS=4"), on("LK_THREADS=8"), "--cores 16"),
    case("K2.auto", on()),
    case("K2.unknown", on("LK_THREADS=8")),
    case("K2.ok", on("LK_THREADS=12"), None, "--cores 16"),
    case("K3.omp", on("OMP_NUM_THREADS=16"), on("OMP_NUM_THREADS=1")),
    case("K3.blas", on("MKL_NUM_THREADS=16"), on("MKL_NUM_THREADS=1")),
    case("K3.ok", on()),
    case("K4.invalid", on("LK_THREAD_BINDING=SOCKET"), on("LK_THREAD_BINDING=NUMA_NODE")),
    case("K4.use_node", compose("cpuset: 0-15"), compose("cap_add: [SYS_NICE]")),
    case("K4.use_node", {"s.sh": f"export {ON}\nvllm serve {GOOD} --port 1\nvllm serve {GOOD} --port 2\n"},
         {"s.sh": f"export {ON} LVLLM_NUMA_NODES=0\nvllm serve {GOOD} --port 1\nexport LVLLM_NUMA_NODES=1\nvllm serve {GOOD} --port 2\n"}),
    case("K4.ok", on()),
    case("K5.invalid", on("LVLLM_NUMA_NODES=west"), on("LVLLM_NUMA_NODES=0-1")),
    case("K5.same_nodes", {"s.sh": f"export {ON} LVLLM_NUMA_NODES=0\nnumactl --cpunodebind=0 vllm serve {GOOD}\n"},
         {"s.sh": f"export {ON}\nnumactl --cpunodebind=0 vllm serve {GOOD}\n"}),
    case("K5.bound_crowded", {"s.sh": f"export {ON} LK_THREADS=16\nnumactl --membind=0 vllm serve {GOOD}\n"},
         {"s.sh": f"export {ON} LK_THREADS=8\nnumactl --membind=0 vllm serve {GOOD}\n"}, "--cores 16 --numa-nodes 2"),
    case("K5.bound", {"s.sh": f"export {ON}\nnumactl -N 0 -m 0 vllm serve {GOOD}\n"},
         {"s.sh": f"export {ON}\nnumactl --cpunodebind=0,1 vllm serve {GOOD}\n"}),
    case("K5.bound", service("NUMAPolicy=bind\nNUMAMask=0"), service("")),
    case("K5.numa_bind", on(options=f"{GOOD} --numa-bind"), on()),
    case("K5.uneven", on(options=f"{GOOD} -tp 2"), on(options=f"{GOOD} -tp 2"), "--numa-nodes 3", "--numa-nodes 4"),
    case("K5.no_interleave", on("LVLLM_ENABLE_NUMA_INTERLEAVE=0"), on("LVLLM_ENABLE_NUMA_INTERLEAVE=1"), "--ram 64"),
    case("K5.container", compose("shm_size: 1g"), compose("cap_add: [SYS_NICE]")),
    case("K5.ok", on()),
    case("K6.invalid", on("LVLLM_GPU_PREFILL_MIN_BATCH_SIZE=-1"), on("LVLLM_GPU_PREFILL_MIN_BATCH_SIZE=4096")),
    case("K6.never", on("LVLLM_GPU_PREFILL_MIN_BATCH_SIZE=20000"), on("LVLLM_GPU_PREFILL_MIN_BATCH_SIZE=8192")),
    case("K6.small_budget", on("LVLLM_GPU_PREFILL_MIN_BATCH_SIZE=10000"), on("LVLLM_GPU_PREFILL_MIN_BATCH_SIZE=8192")),
    case("K6.too_small", on("LK_GPU_PREFILL_MIN_TOKENS=256"), on("LK_GPU_PREFILL_MIN_TOKENS=512")),
    case("K6.off_big_budget", on("LVLLM_GPU_PREFILL_MIN_BATCH_SIZE=0"),
         on("LVLLM_GPU_PREFILL_MIN_BATCH_SIZE=0", f"{M} --max-num-batched-tokens 4096")),
    case("K6.off", on("LVLLM_GPU_PREFILL_MIN_BATCH_SIZE=0", f"{M} --max-num-batched-tokens 4096")),
    case("K6.ok", on()),
    case("K7.invalid", on("LVLLM_GPU_PREFETCH_WINDOW=0"), on("LVLLM_GPU_PREFETCH_WINDOW=1")),
    case("K7.unset", on()),
    case("K7.large", on("LVLLM_GPU_PREFETCH_WINDOW=4"), on("LVLLM_GPU_PREFETCH_WINDOW=2")),
    case("K7.no_prefill", on("LVLLM_GPU_PREFETCH_WINDOW=1 LVLLM_GPU_PREFILL_MIN_BATCH_SIZE=0")),
    case("K7.ok", on("LVLLM_GPU_PREFETCH_WINDOW=2")),
    case("K8.invalid", on("LVLLM_GPU_RESIDENT_MOE_LAYERS=0-x"), on("LVLLM_GPU_RESIDENT_MOE_LAYERS=0-3,8")),
    case("K8.invalid", on("LVLLM_GPU_RESIDENT_MOE_LAYERS=5-2"), on("LVLLM_GPU_RESIDENT_MOE_LAYERS=main:0-2,mtp:0")),
    case("K8.beyond",
         on("LVLLM_GPU_RESIDENT_MOE_LAYERS=60", "./m --max-num-seqs 4", **{"m/config__json": CONFIG}),
         on("LVLLM_GPU_RESIDENT_MOE_LAYERS=40", "./m --max-num-seqs 4", **{"m/config__json": CONFIG})),
    case("K8.outside", serve("deepseek-ai/DeepSeek-V3", f"{ON} LVLLM_GPU_RESIDENT_MOE_LAYERS=0-5"),
         serve("deepseek-ai/DeepSeek-V3", f"{ON} LVLLM_GPU_RESIDENT_MOE_LAYERS=3-5")),
    case("K8.room", on(), on("LVLLM_GPU_RESIDENT_MOE_LAYERS=0-3"), "--gpu 'RTX 5090:1'"),
    case("K8.overlap", on("LVLLM_GPU_RESIDENT_MOE_LAYERS=0-5,3"), on("LVLLM_GPU_RESIDENT_MOE_LAYERS=0-5,8")),
    case("K8.ok", on("LVLLM_GPU_RESIDENT_MOE_LAYERS=0-5")),
    case("K9.eager", on(options=f"{GOOD} --enforce-eager"), on()),
    case("K9.eager", on(options=f"{GOOD} -O0"), on(options=f"{GOOD} -O2")),
    case("K9.none", on(options=f"{GOOD} -cc.cudagraph_mode NONE"), on(options=f"{GOOD} -cc.cudagraph_mode FULL_DECODE_ONLY")),
    case("K9.piecewise", on(options=f"{GOOD} -cc.cudagraph_mode PIECEWISE"), on()),
    case("K9.ok", on()),
    case("K10.mixed_all_reduce", on(options=f"{GOOD} -tp 2"), on(options=f"{GOOD} -tp 2 --disable-custom-all-reduce"), MIXED),
    case("K10.pcie_all_reduce", on(options=f"{GOOD} -tp 4"), on(options=f"{GOOD} -tp 4 --disable-custom-all-reduce"),
         "--gpu 'RTX 3090:4'"),
    case("K10.arch_list", on(options=f"{GOOD} -tp 2 --disable-custom-all-reduce"),
         on("FLASHINFER_CUDA_ARCH_LIST='8.6 12.0'", f"{GOOD} -tp 2 --disable-custom-all-reduce"), MIXED),
    case("K10.order", on("FLASHINFER_CUDA_ARCH_LIST='8.6 12.0'", f"{GOOD} -tp 2 --disable-custom-all-reduce"),
         on("CUDA_DEVICE_ORDER=PCI_BUS_ID FLASHINFER_CUDA_ARCH_LIST='8.6 12.0'", f"{GOOD} -tp 2 --disable-custom-all-reduce"), MIXED),
    case("K10.single", on(), None, "--gpu 'RTX 3090:1'"),
    case("K10.unknown", on()),
    case("K10.ok", on(options=f"{GOOD} -tp 2"), None, TWO),
    case("K11.limit", compose("mem_limit: 32g"), compose("mem_limit: 128g")),
    case("K11.too_small", on(), on(), "--ram 48", "--ram 128"),
    case("K11.tight", on(), on(), "--ram 64", "--ram 128"),
    case("K11.tight", on("LVLLM_HOST_GIB=64"), on("LVLLM_HOST_GIB=128"), "--ram 512"),
    case("K11.memlock", service("LimitMEMLOCK=8G"), service("LimitMEMLOCK=infinity"), "--ram 512"),
    case("K11.memlock", {"s.sh": f"ulimit -l 65536\nexport {ON}\nvllm serve {GOOD}\n"},
         {"s.sh": f"ulimit -l unlimited\nexport {ON}\nvllm serve {GOOD}\n"}, "--ram 512"),
    case("K11.unknown", on()),
    case("K11.ok", on(), None, "--ram 512"),
    case("K12.large", on(options=f"{M} --max-num-seqs 64"), on()),
    case("K12.unset", on(options=M), on()),
    case("K12.fraction", on(options=f"{GOOD} --gpu-memory-utilization 0.8"), on(options=f"{GOOD} --gpu-memory-utilization 0.9")),
    case("K12.ok", on()),
    case("K13.offload", on(options=f"{GOOD} --cpu-offload-gb 20"), on(options=f"{GOOD} --cpu-offload-gb 0")),
    case("K13.eplb", on(options=f"{GOOD} --enable-eplb"), on()),
    case("K13.dbo", on(options=f"{GOOD} --enable-dbo"), on()),
    case("K13.ep_uneven", on(options=f"{GOOD} -ep -tp 3"), on(options=f"{GOOD} -ep -tp 2")),
    case("K13.sleep", on(options=f"{GOOD} --enable-sleep-mode")),
    case("K13.ok", on()),
    case("K14.no_effect", on("LVLLM_MOE_USE_WEIGHT=KEEP"), on()),
    case("K14.unknown", on("VLLM_PLE_CPU_OFFLOAD=1"), on()),
    case("K14.refused", on("VLLM_PLE_CPU_OFFLOAD=1", f"{GOOD} --fail-on-environ-validation"), on("VLLM_PLE_CPU_OFFLOAD=1")),
    case("K14.fork", on(requirements__txt="lvllm\nvllm @ https://example.org/vllm-0.33.0-cp312-none-any.whl\n"),
         on(requirements__txt="lvllm\nvllm==0.33.0\n")),
    case("K14.ok", on()),
    case("X8.notice", on("LVLLM_GPU_RESIDENT_MOE_LAYERS=auto"), on("LVLLM_GPU_RESIDENT_MOE_LAYERS=0-3")),
    *(
        case(f"K{n}.not_hybrid", serve("deepseek-ai/DeepSeek-V3"), None, "--gpu 'RTX 3090:1' --ram 1024")
        for n in range(2, 15)
    ),
]
