"""Checks of the configuration before anything is built: refusals with ways out, checkpoint, memory fit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lvllm import checkpoint, envs, fit, native
from lvllm.vllm import placement

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GRAPH_SECTION = "lvllm_graph"
_LOAD_FORMATS = {
    "sharded_state": "it stores vLLM's own state dict, in which host experts do not appear",
    "runai_streamer_sharded": "it stores vLLM's own state dict, in which host experts do not appear",
    "tensorizer": "it stores vLLM's own state dict, in which host experts do not appear",
    "ipc_cache": "it maps weights that a GPU kernel has already repacked",
}


class RefusedConfigError(ValueError):
    """An option of vLLM that cannot work together with experts on the host; the text names a way out."""


def prepare(engine_args: Any) -> envs.Settings:
    """Before the configuration is built: read the settings, put them into the compile hash."""
    additional = engine_args.additional_config
    if additional is not None and not isinstance(additional, dict):
        raise RefusedConfigError(
            f"lvllm: additional_config is a {type(additional).__name__}; give a dict, so that lvllm's "
            "settings can be part of vLLM's compile-cache key."
        )
    settings = envs.load((additional or {}).get(envs.CONFIG_SECTION))
    marker = {"version": native.version(), **settings.graph_key()}
    engine_args.additional_config = {**(additional or {}), GRAPH_SECTION: marker}
    return settings


def verify(config: VllmConfig, settings: envs.Settings) -> None:
    """After the configuration is built. Raises RefusedConfigError, CheckpointError or HostMemoryError."""
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    logger = init_logger("vllm.lvllm")
    logger.info(
        "lvllm %s, effective configuration:\n%s", native.version(), envs.format_table(settings.table())
    )
    for line in envs.notices(settings, on_gpu=not current_platform.is_cpu()):
        logger.warning("%s", line)
    if unbuilt := envs.unbuilt_values(settings):
        raise RefusedConfigError("lvllm: " + "; ".join(unbuilt) + ".")
    placement.ledger(config)  # binds the layer lists to this model: numbers beyond its layers fail here
    if not config.model_config.is_moe:
        return
    from lvllm.vllm import step

    if current_platform.device_type not in step.DEVICES:
        raise RefusedConfigError(f"lvllm: {step.no_handover(current_platform.device_type)}")
    if problems := refusals(config):
        raise RefusedConfigError("lvllm: " + " ".join(problems))
    _warn_about_prefill_threshold(config, settings, logger)
    _check_checkpoint(config, settings, logger)


def checkpoint_folder(config: VllmConfig) -> Path | None:
    """Local folder of the model's safetensors files; None while a hub model is not in the local cache yet."""
    model = config.model_config
    path = Path(str(getattr(model, "model_weights", "") or model.model))
    if path.is_dir():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(str(model.model), "config.json", revision=model.revision)
    except Exception:  # not a hub id, or a hub client without a cache: nothing to look at
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _check_checkpoint(config: VllmConfig, settings: envs.Settings, logger: Any) -> None:
    load_format = str(config.load_config.load_format)
    if load_format not in ("auto", "hf", "safetensors"):
        return
    folder = checkpoint_folder(config)
    if folder is None or not any(folder.glob("*.safetensors*")):
        logger.info(
            "expert headers are not checked before loading: no local safetensors files of this model yet"
        )
        return
    started = time.perf_counter()
    text = config.model_config.hf_text_config
    uniform = not getattr(text, "block_configs", None)
    quantized = getattr(config.model_config.hf_config, "quantization_config", None) is not None
    layers = checkpoint.check_experts(
        checkpoint.read_folder(folder),
        num_experts=config.model_config.get_num_experts() if uniform else 0,
        quantized=quantized or config.quant_config is not None,
    )
    book = placement.ledger(config)
    itemsize = config.model_config.dtype.itemsize  # type: ignore[union-attr]  # resolved by now
    on_host = [
        layer for name, layer in layers.items() if book.builds(placement.identify(name, book.num_main))
    ]
    needed = sum(layer.host_bytes(itemsize) for layer in on_host) * _copies(config)
    line = fit.check(needed, settings, what=f"{len(on_host)} of {len(layers)} MoE layers in {folder.name}")
    logger.info("%s; headers checked in %.1f s", line, time.perf_counter() - started)


def _copies(config: VllmConfig) -> int:
    """How many times this host holds all experts: once per data-parallel replica without EP."""
    parallel = config.parallel_config
    return 1 if parallel.enable_expert_parallel else max(1, parallel.data_parallel_size_local)


def refusals(config: VllmConfig) -> list[str]:
    """Sentences about options that cannot be served together with host experts."""
    parallel, offload = config.parallel_config, config.offload_config
    found = []
    if parallel.enable_eplb:
        found.append("--enable-eplb moves experts between GPUs, host experts do not move: drop it.")
    if config.lora_config is not None:
        found.append(
            "--enable-lora: LoRA on experts is not computed on the host: drop it or merge the adapter."
        )
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "ubatch_size", 0) > 1:
        found.append("--enable-dbo runs two micro-batches of a layer at once: drop it.")
    backend = str(getattr(config.kernel_config, "moe_backend", "auto"))
    if "mega" in backend:
        found.append(
            f"--moe-backend {backend} keeps the experts outside vLLM's MoE layer: use --moe-backend auto."
        )
    if getattr(parallel, "numa_bind", False):
        found.append(
            "--numa-bind confines the worker's memory to one node: drop it; choose nodes with "
            "LVLLM_NUMA_NODES."
        )
    if offload.prefetch.offload_group_size > 0:
        found.append(
            "--offload-group-size (prefetch offload) moves whole layers: drop it, the experts are off the "
            "GPU."
        )
    if offload.uva.cpu_offload_gb > 0 and not offload.uva.cpu_offload_params:
        found.append(
            "--cpu-offload-gb without --cpu-offload-params stops at the first module that is on the host: "
            "name the parameters, without experts, or drop it."
        )
    if any("experts" in name for name in offload.uva.cpu_offload_params):
        found.append("--cpu-offload-params names experts, which are on the host already: leave them out.")
    load_format = str(config.load_config.load_format)
    if load_format in _LOAD_FORMATS:
        found.append(
            f"--load-format {load_format}: {_LOAD_FORMATS[load_format]}: use the original checkpoint."
        )
    return found


def _warn_about_prefill_threshold(config: VllmConfig, settings: envs.Settings, logger: Any) -> None:
    threshold = settings.gpu_prefill_min_batch_size
    batch = config.scheduler_config.max_num_batched_tokens
    if threshold is not None and threshold > batch:
        logger.warning(
            "LVLLM_GPU_PREFILL_MIN_BATCH_SIZE=%d is larger than max_num_batched_tokens=%d, the most tokens "
            "that a step can hold: no step reaches it",
            threshold,
            batch,
        )
