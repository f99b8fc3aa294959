"""The patches that lvllm applies to vLLM, all of them, and when each can go.

1. RoutedExperts._get_quant_method: hands back the stock method object re-classed to its host form. Goes when
vLLM has
   a registry for expert methods that covers every quantisation and sees the layer before its weights exist.
2. EngineArgs.create_engine_config: checks the configuration before the engine starts. Goes when plugins get a
   configuration hook.
3. BaseModelLoader.load_model: accounts for every MoE layer once a model is loaded. Goes with 2.
4. Worker.execute_model and Worker.sample_tokens, on GPUs only (handover.guard_steps): raise when the engine
   has failed, since a replayed CUDA graph runs no Python. Goes when workers have a hook around a step.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from lvllm import native
from lvllm.vllm import compat

_SENTINEL = "_lvllm_hook"


def wrap(owner: type, name: str, make: Any, parameters: tuple[str, ...]) -> None:
    """Replace owner.name by make(stock) once. The stock signature must begin with `parameters`."""
    stock = getattr(owner, name, None)
    if stock is None:
        raise compat.UnsupportedVllmError(
            f"lvllm: vLLM {compat.vllm_version()} has no {owner.__name__}.{name}, which lvllm hooks into; "
            f"install vLLM {compat.TESTED_TEXT}."
        )
    if getattr(stock, _SENTINEL, False):
        return
    found = tuple(inspect.signature(stock).parameters)
    if found[: len(parameters)] != parameters:
        raise compat.UnsupportedVllmError(
            f"lvllm: {owner.__name__}.{name} of vLLM {compat.vllm_version()} takes {found} instead of "
            f"{parameters}; install vLLM {compat.TESTED_TEXT}."
        )
    hook = functools.wraps(stock)(make(stock))
    setattr(hook, _SENTINEL, True)
    setattr(owner, name, hook)


def installed() -> bool:
    """Whether the method hook is in, in this process."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return bool(getattr(RoutedExperts._get_quant_method, _SENTINEL, False))


def install() -> None:
    """Check vLLM and the native module, then apply the patches. Idempotent.

    Raises UnsupportedVllmError or NativeModuleError before anything of vLLM has been changed.
    """
    compat.check()
    native.load()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    wrap(RoutedExperts, "_get_quant_method", _host_method, ("self", "prefix", "quant_config", "moe_config"))
    wrap(EngineArgs, "create_engine_config", _checked_config, ("self",))
    wrap(BaseModelLoader, "load_model", _accounted_load, ("self", "vllm_config", "model_config"))


def _host_method(stock: Any) -> Any:
    def _get_quant_method(self: Any, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        from lvllm.vllm import method

        return method.to_host(self, stock(self, prefix, quant_config, moe_config), moe_config)

    return _get_quant_method


def _checked_config(stock: Any) -> Any:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from lvllm.vllm import checks

        settings = checks.prepare(self)
        config = stock(self, *args, **kwargs)
        checks.verify(config, settings)
        return config

    return create_engine_config


def _accounted_load(stock: Any) -> Any:
    def load_model(self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        from lvllm.vllm import placement

        model = stock(self, vllm_config, model_config, *args, **kwargs)
        placement.account(model, vllm_config, model_config)
        return model

    return load_model
