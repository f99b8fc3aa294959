"""I. Production serving."""

from __future__ import annotations

from lvllm.audit import names
from lvllm.audit.checks.context import Context, Edit, Outcome, each, show
from lvllm.audit.checks.registry import check
from lvllm.audit.facts import Unit
from lvllm.audit.values import number

_ROLES = {"kv_producer": "kv_consumer", "kv_consumer": "kv_producer"}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MANY_OPTIONS = 12


def api_servers(c: Context) -> int:
    """API server processes: as set, else the data-parallel size (1 where vLLM says so)."""
    if c.has("api_server_count"):
        return c.size("api_server_count")
    single = c.flag("headless") or c.flag("data_parallel_external_lb") or c.env_flag("VLLM_USE_RUST_FRONTEND")
    return 1 if single else c.dp


def runtime_lora(c: Context) -> bool:
    return c.env_flag("VLLM_ALLOW_RUNTIME_LORA_UPDATING") is True


@check("I1")
def lora_serving(c: Context) -> Outcome:
    if not c.serve:
        return c.out("I1.not_serve")
    for fact in each(c, "enable_lora_bias", "lora_extra_vocab_size"):
        row = names.removed("options")[fact.name]
        if c.gone(row["gone"]):
            return c.out("I1.gone", fact, gone=row["gone"], edits=[Edit(fact.name, None)])
    modules = c.fact("lora_modules")
    if modules is not None and c.fact("enable_lora") is None:
        return c.out("I1.not_enabled", modules, edits=[Edit("enable_lora", "")])
    if modules is not None and isinstance(modules.value, list):
        slots = int(c.num("max_loras") or 1)
        if len(modules.value) > slots:
            count = len(modules.value)
            return c.out("I1.too_many", modules, c.fact("max_loras"), modules=count, slots=slots,
                         edits=[Edit("max_loras", str(count))])  # fmt: skip
    copies = _copies(c)
    if len(copies) > 1:
        facts = [u.settings["model"] for u in copies]
        return c.out("I1.copies", *facts, count=len(copies), model=str(facts[0].value))
    if modules is None and not c.flag("enable_lora"):
        return c.out("I1.none")
    return c.out("I1.ok", modules or c.fact("enable_lora"))


def _copies(c: Context) -> list[Unit]:
    """Servers of the same file that serve the same base model, roles of one split server excluded."""
    model = c.text("model")
    if model is None or c.has("kv_transfer_config") or c.has("data_parallel_rank") or c.has("node_rank"):
        return []
    mine = [
        u for u in (c.unit, *c.neighbours)
        if u.serves and u.site.file == c.unit.site.file and not u.documentation
        and u.settings.get("model") is not None and u.settings["model"].value == model
        and "kv_transfer_config" not in u.settings
    ]  # fmt: skip
    ports = {str(u.settings["port"].value) if "port" in u.settings else "" for u in mine}
    return sorted(mine, key=lambda u: u.site) if len(mine) > 1 and len(ports) == len(mine) else []


@check("I2")
def api_processes(c: Context) -> Outcome:
    if not c.serve:
        return c.out("I2.not_serve")
    fact = c.fact("api_server_count")
    count = c.num("api_server_count")
    if count is not None and count > 1:
        if runtime_lora(c):
            return c.out("I2.runtime_lora", fact, c.env("VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
                         edits=[Edit("api_server_count", "1")])  # fmt: skip
        if c.env_flag("VLLM_USE_RUST_FRONTEND"):
            return c.out(
                "I2.rust", fact, c.env("VLLM_USE_RUST_FRONTEND"), edits=[Edit("api_server_count", None)]
            )
        cores = c.hardware.cores
        if cores is not None and count > max(1.0, cores - c.dp - c.tp * c.pp * c.dp):
            return c.out("I2.too_many", fact, cores=f"{cores:g}")
    rate = c.hint("high_rate")
    if rate is not None and c.dp == 1 and (count is None or count == 1) and fact is None:
        return c.out("I2.worth", rate)
    return c.out("I2.ok", fact)


@check("I3")
def disaggregated(c: Context) -> Outcome:
    if not c.serve:
        return c.out("I3.not_serve")
    fact = c.fact("kv_transfer_config")
    keys = c.mapping("kv_transfer_config")
    if fact is not None and keys:
        role = keys.get("kv_role")
        if not role:
            return c.out("I3.no_role", fact)
        other = _ROLES.get(str(role))
        if other is not None and not any(_role(u) == other for u in c.others):
            return c.out("I3.one_sided", fact, role=role)
    if fact is not None:
        return c.out("I3.ok", fact)
    nodes = c.size("nnodes")
    if c.goal == "latency" and nodes >= 2:
        return c.out("I3.worth", c.fact("nnodes"), nodes=nodes)
    return c.out("I3.off")


def _role(unit: Unit) -> str | None:
    fact = unit.settings.get("kv_transfer_config")
    return str(fact.value.get("kv_role")) if fact is not None and isinstance(fact.value, dict) else None


@check("I4")
def configuration_file(c: Context) -> Outcome:
    if not c.serve:
        return c.out("I4.not_serve")
    if c.unit.conflicts:
        in_file, on_line = c.unit.conflicts[0]
        return c.out("I4.conflict", in_file, on_line, name=in_file.name, file_value=show(in_file),
                     line_value=show(on_line))  # fmt: skip
    if c.unit.launch is not None and not c.unit.config_files:
        mine = _options(c.unit)
        long = len(mine) >= _MANY_OPTIONS
        launched = (u for u in c.others if u.launch is not None) if long else ()
        same = [u for u in launched if len(_options(u) & mine) >= _MANY_OPTIONS]
        if same:
            sites = [u.site for u in sorted(same, key=lambda u: u.site)]
            return c.out(
                "I4.repeated", c.unit.site, *sites, count=len(_options(same[0]) & mine), lines=len(same) + 1
            )
    return c.out("I4.ok")


def _options(unit: Unit) -> set[str]:
    return {f"{n}={f.value}" for n, f in unit.settings.items() if f.origin != "config file" and n != "model"}


@check("I5")
def exposure(c: Context) -> Outcome:
    if not c.serve:
        return c.out("I5.not_serve")
    public = c.exposed()
    host = c.fact("host")
    unset_host = host is None or (host.known and host.value not in _LOOPBACK)
    container_only = c.unit.resources.container and public is None
    why = _control(c)
    if why is not None and not c.protected() and (public is not None or (unset_host and not container_only)):
        return c.out("I5.control", public, c.env(why), why=why)
    if (
        c.model is not None
        and c.model.multimodal
        and not c.has("limit_mm_per_prompt")
        and not c.flag("language_model_only")
    ):
        return c.out("I5.multimodal", c.fact("model"))
    if public is not None:
        for fact in each(c, "trust_request_mm_kwargs", "trust_request_chat_template"):
            if c.flag(fact.name):
                return c.out("I5.trust", fact, public, edits=[Edit(fact.name, None)])
        if not c.protected():
            shown = f"{public.written or public.name} {show(public)}".strip()
            return c.out("I5.open", public, why=shown)
    return c.out("I5.ok")


def _control(c: Context) -> str | None:
    """The variable that opens control endpoints."""
    if c.env_flag("VLLM_SERVER_DEV_MODE"):
        return "VLLM_SERVER_DEV_MODE"
    return "VLLM_ALLOW_RUNTIME_LORA_UPDATING" if runtime_lora(c) else None


def cores_needed(c: Context) -> int:
    """Processes that want a core each: API servers, engine cores, GPU workers, the coordinator."""
    gpus = c.tp * c.pp * c.dp
    declared = number(c.hardware.count)
    if declared is not None and c.dp > 1:
        gpus = max(gpus, int(declared))
    servers = api_servers(c) if c.serve else 1
    return servers + c.dp + gpus + (1 if c.dp > 1 else 0)
