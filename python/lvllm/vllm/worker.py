"""What one vLLM worker process owns: the engine, and per MoE layer its host side."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from lvllm import envs, host
from lvllm.native import load as load_native
from lvllm.vllm import handover, placement
from lvllm.vllm.formats import UnsupportedLayerError, layer_options, way_out, weight_format
from lvllm.vllm.loader import LayerIntake

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from lvllm import _lk

_DUMMY_SEED = 20260


def settings_of(config: VllmConfig) -> envs.Settings:
    """Settings of the process: environment over additional_config."""
    additional = config.additional_config
    return envs.load(additional.get(envs.CONFIG_SECTION) if isinstance(additional, dict) else None)


def _place_among_workers(config: VllmConfig) -> tuple[int, int]:
    """(rank, world) among the worker processes that share this host's cores."""
    from vllm.distributed.parallel_state import get_world_group

    parallel = config.parallel_config
    group = get_world_group()
    world = group.world_size * parallel.data_parallel_size_local
    rank = group.local_rank + group.world_size * (parallel.data_parallel_rank_local or 0)
    return rank % world, world


@functools.cache
def _engine(settings_key: str, rank: int, world: int) -> _lk.Engine:
    from vllm.platforms import current_platform

    settings = _ENGINE_SETTINGS[settings_key]
    engine: _lk.Engine = load_native().Engine(
        **envs.engine_options(settings),
        rank=rank,
        world=world,
        allowed_cpus=host.inherited_cpus(),
        # On the CPU platform the caller's thread is a worker; beside a GPU it launches kernels meanwhile.
        reserve_cores=0 if current_platform.is_cpu() else world,
    )
    from vllm.logger import init_logger

    init_logger("vllm.lvllm").info("engine: %s", describe_line(engine.describe()))
    return engine


_ENGINE_SETTINGS: dict[str, envs.Settings] = {}


def engine_of(config: VllmConfig) -> _lk.Engine:
    """The engine of this process, started on first use, never at import: a fork before it is harmless."""
    settings = settings_of(config)
    key = repr(settings)
    _ENGINE_SETTINGS[key] = settings
    return _engine(key, *_place_among_workers(config))


def describe_line(facts: dict[str, Any]) -> str:
    """Engine.describe() on one line."""
    nodes = "; ".join(
        f"node {n['node']}: {n['workers']} workers on CPUs {host.worker_cpus(n)}"
        for n in facts.get("nodes", [])
    )
    notes = "".join(f"; {n}" for n in facts.get("notes", []))
    return f"{facts.get('isa')}, {facts.get('threads')} threads ({nodes}){notes}"


class HostLayer:
    """One MoE layer on the host: its place in the model, its engine layer and its intake."""

    def __init__(self, layer: RoutedExperts, method: str, created: list[str]) -> None:
        from vllm.config import get_current_vllm_config

        config = get_current_vllm_config()
        params = {n: layer.get_parameter(n) for n in created}
        moe = layer.moe_config
        self.format = weight_format(layer, method, params)
        # Decode steps of speculation hold several tokens a request; the scheduler's cap bounds them all. With
        # data parallelism the tokens of every rank arrive.
        max_tokens = config.scheduler_config.max_num_batched_tokens * max(1, moe.dp_size)
        options = layer_options(layer, self.format, max_tokens)
        native = load_native()
        try:
            self.engine_layer: _lk.Layer = engine_of(config).create_layer(layer.layer_name, **options)
        except native.UnsupportedFormatError as error:
            raise UnsupportedLayerError(
                f"lvllm: {layer.layer_name}: {error}. {way_out(layer.layer_name)}"
            ) from error
        self.handover = handover.hub_of(engine_of(config)).enrol(
            self.engine_layer,
            hidden_size=int(options["hidden_size"]),
            top_k=int(options["top_k"]),
            dtype=moe.in_dtype,
            max_tokens=max_tokens,
        )
        self.dummy = config.load_config.load_format == "dummy"
        ledger = placement.ledger(config)
        self.intake = LayerIntake(
            layer,
            params,
            self.format,
            self.engine_layer,
            ledger.progress,
            # Every rank's partial sum is reduced, so only the first may add the bias of w2.
            skip_w2_bias=moe.tp_rank > 0,
        )
        ledger.progress.expect(layer.layer_name, self.intake.expert_bytes * layer.local_num_experts)
        ledger.claim(layer.layer_name, self.engine_layer, self.format.name)
        self.names = list(created)
        if self.dummy:
            # The dummy loader would write, and so commit, every page; it leaves placeholders alone.
            for name in created:
                param = params[name]
                meta = torch.nn.Parameter(param.data.to("meta"), requires_grad=False)
                vars(meta).update(vars(param))
                layer._parameters[name] = meta

    def finish(self, layer: RoutedExperts) -> None:
        """Seal the layer and drop its parameters; called by vLLM after loading and after each reload."""
        params = {n: layer.get_parameter(n).data for n in self.names if layer._parameters.get(n) is not None}
        if all(p.is_meta for p in params.values()):
            if not self.dummy:
                raise RuntimeError(
                    f"lvllm: {layer.layer_name}: weights were processed before any was loaded."
                )
            self.engine_layer.fill_dummy(_DUMMY_SEED)
            self.engine_layer.seal()
            self.intake.sealed = True
            self.intake.buffers.clear()
            self.intake.progress.layer_done(layer.layer_name, self.engine_layer)
        else:
            self.intake.finish(params)
        for name in self.names:
            if name in layer._parameters:
                delattr(layer, name)
