"""H. RL and training integration."""

from __future__ import annotations

from lvllm.audit import modes, names
from lvllm.audit.checks.context import Context, Edit, Outcome
from lvllm.audit.checks.memory import gpu_set, sleeps
from lvllm.audit.checks.registry import check
from lvllm.audit.facts import Fact, Unit, first
from lvllm.audit.readers import frameworks
from lvllm.audit.values import boolean, number
from lvllm.audit.versions import allows, of_package, parse, ranges_meet

_HOW = {
    "trl": "vllm_enable_sleep_mode=True", "verl": "free_cache_engine=True", "openrlhf": "--vllm.enable_sleep",
    "swift": "--sleep_level 2", "unsloth": "unsloth_vllm_standby",
}  # fmt: skip
_SYNC = ("update_weights", "reload_weights", "collective_rpc", "start_weight_update", "http:/update_weights",
         "http:/collective_rpc", "http:/start_weight_update")  # fmt: skip


@check("H1")
def sleep_mode(c: Context) -> Outcome:
    if not c.rlhf:
        return c.out("H1.not_rl")
    if not c.colocate:
        return c.out("H1.server")
    own = c.unit.framework is None
    if own:
        calls = c.unit.called("sleep")
        deep = [s for s in calls if isinstance(s.value, dict) and number(s.value.get("level")) == 2]
        if deep and not c.unit.called(*_SYNC):
            return c.out("H1.level2_no_sync", deep[0])
        if calls and c.fact("enable_sleep_mode") is None:
            return c.out("H1.not_enabled", calls[0])
    if sleeps(c):
        return c.out("H1.on", c.fact("enable_sleep_mode") or c.key("sleep_level"))
    how = _HOW.get(c.unit.framework or "", "enable_sleep_mode=True")
    fraction = c.fact("gpu_memory_utilization")
    evidence = (
        c.key("free_cache_engine") or c.key("sleep_level") or c.fact("enable_sleep_mode") or c.unit.site
    )
    rule = "H1.off_high" if c.fraction >= 0.7 else "H1.off"
    edits: list[Edit] = []
    if c.unit.framework == "trl" and c.has("enable_sleep_mode"):
        edits = [Edit("enable_sleep_mode", "True")]
    return c.out(rule, evidence, fraction, fraction=f"{c.fraction:g}", how=how, edits=edits)


@check("H2")
def weight_transfer(c: Context) -> Outcome:
    if not c.rlhf:
        return c.out("H2.not_rl")
    own = c.unit.framework is None
    saves, updates = c.unit.called("save_checkpoint"), c.unit.called(*_SYNC)
    if c.mode == modes.SERVER and own and saves and c.unit.called("optimizer_step") and not updates:
        return c.out("H2.by_disk", saves[0])
    backend = c.mapping("weight_transfer_config").get("backend")
    trainer = _partner(c)
    if backend == "ipc" and c.mode == modes.SERVER:
        mine, theirs = gpu_set(c.unit), gpu_set(trainer) if trainer is not None else None
        if c.size("nnodes") > 1 or (mine is not None and theirs is not None and mine != theirs):
            return c.out("H2.ipc_apart", c.fact("weight_transfer_config"))
    sync = c.key("vllm.sync_backend")
    if sync is not None and sync.value == "gloo":
        return c.out("H2.gloo", sync)
    return c.out("H2.ok", c.fact("weight_transfer_config"))


def _partner(c: Context) -> Unit | None:
    """The other half of a server-mode pair: the trainer of a server, the server of a trainer.

    None unless the project leaves no doubt which one it is.
    """
    found = [
        other
        for other in c.others
        if not other.documentation
        and c.unit.serves != other.serves
        and (other.framework in ("trl", "swift") or other.serves)
        and modes.paired(c.unit, other, c.project)
    ]
    near = [o for o in found if o.site.file == c.unit.site.file] or found
    return near[0] if len(near) == 1 else None


@check("H3")
def colocate_hygiene(c: Context) -> Outcome:
    if not c.rlhf:
        return c.out("H3.not_rl")
    if not c.colocate:
        return c.out("H3.server")
    training = c.key("training_memory_fraction") or c.key("trainer_gpu_memory_fraction")
    share = number(training.value) if training is not None else None
    if not sleeps(c):
        if share is not None and c.fraction + share > 0.95:
            return c.out("H3.over", c.fact("gpu_memory_utilization"), training, fraction=f"{c.fraction:g}",
                         training=f"{share:g}")  # fmt: skip
        if c.flag("enforce_eager") is True and c.unit.framework != "verl":
            return c.out("H3.eager", c.fact("enforce_eager"))
    return c.out("H3.ok")


@check("H4")
def server_separation(c: Context) -> Outcome:
    if not c.rlhf:
        return c.out("H4.not_rl")
    if c.colocate:
        return c.out("H4.colocate")
    partner = _partner(c)
    trainer = partner if c.unit.serves else c.unit
    if partner is not None and trainer is not None and modes.same_host(trainer):
        mine, theirs = gpu_set(c.unit), gpu_set(partner)
        if mine is not None and theirs is not None and mine & theirs:
            shared = ",".join(sorted(mine & theirs))
            return c.out("H4.shared", c.unit.env.get("CUDA_VISIBLE_DEVICES"),
                         partner.env.get("CUDA_VISIBLE_DEVICES"), gpus=shared)  # fmt: skip
    addressed = any(c.key(k) is not None for k in ("vllm_server_host", "vllm_server_base_url"))
    if c.unit.framework == "trl" and not c.unit.serves and not addressed and _several_nodes(c):
        return c.out("H4.no_address", c.key("vllm_mode") or c.unit.site)
    return c.out("H4.ok")


def _several_nodes(c: Context) -> bool:
    launch = c.unit.launch
    if launch is None:
        return False
    words = [w.value for w in launch.words]
    for i, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in ("--num_machines", "--nnodes", "--num-machines"):
            count = value or (words[i + 1] if i + 1 < len(words) else "")
            return (number(count) or 1) > 1
    return False


@check("H5")
def asynchronous(c: Context) -> Outcome:
    if not c.rlhf:
        return c.out("H5.not_rl")
    asynchronous_key = next(
        (
            k
            for k in map(c.key, ("train.async_enable", "async_generate"))
            if k is not None and boolean(k.value)
        ),
        None,
    )
    pauses = c.unit.called("pause_generation", "http:/pause")
    updates = c.unit.called("update_weights", "http:/update_weights")
    in_flight = c.unit.called("generate_async") or c.unit.launcher == "engine"
    if c.unit.framework is None and updates and in_flight and not pauses:
        return c.out("H5.no_pause", updates[0])
    if asynchronous_key is not None or pauses:
        return c.out("H5.on", asynchronous_key or pauses[0])
    gpus = c.hardware.count
    if gpus is not None and gpus >= 16 and c.mode == modes.SERVER:
        return c.out("H5.worth", c.unit.site, gpus=gpus)
    return c.out("H5.off")


def lora_evidence(c: Context) -> Fact | None:
    """Anything that shows LoRA training."""
    for name in ("use_peft", "lora_rank", "lora_r", "lora_target_modules", "lora_alpha"):
        key = c.key(name)
        if key is not None and key.value not in (0, False, None, "false", "0"):
            return key
    train_type = c.key("train_type") or c.key("tuner_type") or c.key("finetuning_type")
    if train_type is not None and train_type.value == "lora":
        return train_type
    return first(c.unit.called("lora_training"))


@check("H6")
def lora_update(c: Context) -> Outcome:
    if not c.rlhf:
        return c.out("H6.not_rl")
    trained = lora_evidence(c)
    served = c.fact("enable_lora") if c.flag("enable_lora") else None
    loads = c.unit.called("http:/v1/load_lora_adapter", "load_lora")
    runtime = c.env_flag("VLLM_ALLOW_RUNTIME_LORA_UPDATING") is True
    if (
        trained is not None
        and c.mode == modes.SERVER
        and c.unit.framework is None
        and not loads
        and c.unit.called(*_SYNC)
    ):
        return c.out("H6.full_sync", trained)
    if c.unit.serves and served is not None and _project_loads(c) and not runtime:
        return c.out("H6.not_allowed", served)
    count = c.fact("api_server_count")
    if runtime and (c.num("api_server_count") or 1) > 1:
        return c.out("H6.api_servers", count, edits=[Edit("api_server_count", "1")])
    rank, limit = _rank(c), c.num("max_lora_rank")
    if rank is not None and limit is not None and limit < rank:
        return c.out(
            "H6.rank",
            c.fact("max_lora_rank"),
            c.key("lora_rank") or c.key("lora_r"),
            rank=int(rank),
            edits=[Edit("max_lora_rank", str(int(rank)))],
        )
    if trained is None and served is None and not loads:
        return c.out("H6.none")
    return c.out("H6.ok", served or trained)


def _project_loads(c: Context) -> bool:
    return any(f.name in ("http:/v1/load_lora_adapter",) for f in c.project.calls)


def _rank(c: Context) -> float | None:
    for name in ("lora_rank", "lora_r"):
        key = c.key(name)
        if key is not None and number(key.value) is not None:
            return number(key.value)
    found = first(c.unit.called("lora_training"))
    return number(found.value) if found is not None else None


@check("H7")
def reload_and_versions(c: Context) -> Outcome:
    if not c.rlhf:
        return c.out("H7.not_rl")
    method = c.text("quantization")
    if c.quantized in ("awq", "gptq", "w4a16", "bitsandbytes") and lora_evidence(c) is None:
        return c.out("H7.four_bit", c.fact("model"), kind=c.quantized)
    framework = c.unit.framework
    entry = frameworks.spec(framework) if framework in names.table("frameworks") and framework else {}
    supported = entry.get("supported")
    if supported and c.version.known and _same_framework(c, entry):
        found: dict[str, object] = {
            "framework": framework,
            "checked": entry["checked"],
            "supported": supported,
            "declared": c.version.text,
        }
        site = c.version.site or c.unit.site
        if c.version.exact and not allows(supported, c.version.text):
            return c.out("H7.excluded", site, found=found)
        if not c.version.exact and not ranges_meet(supported, f">={c.version.text}"):
            return c.out("H7.range", site, found=found)
    if method in names.choices("quantization_online"):
        return c.out("H7.online", c.fact("quantization"))
    return c.out("H7.ok", c.version.site)


def _same_framework(c: Context, entry: dict[str, str]) -> bool:
    """The range is known for one release of the framework; nothing is said about others."""
    declared = of_package(c.project.dependencies, entry["package"], c.unit.site.file)
    if declared.exact:
        return declared.text.split(".")[:2] == entry["checked"].split(".")[:2]
    return declared.known and parse(declared.text) >= parse(entry["checked"])
