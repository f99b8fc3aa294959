"""Which of the five modes a unit runs in (first rule that matches), and whether it is hybrid."""

from __future__ import annotations

import posixpath
import re

from lvllm.audit import names
from lvllm.audit.facts import Unit
from lvllm.audit.link import Project
from lvllm.audit.values import boolean, number
from lvllm.audit.versions import of_package

COLOCATE = "rlhf_colocate"
SERVER = "rlhf_server"
FRAMEWORK = "framework_integrated"
SERVE = "standalone_serve"
OFFLINE = "standalone_offline"
MODES = (COLOCATE, SERVER, FRAMEWORK, SERVE, OFFLINE)

HYBRID_NAMES = re.compile(r"^(LVLLM_|LK_)[A-Z0-9_]+$")
_INTEGRATED = (
    "llamafactory",
    "swift",
    "lm_eval",
    "langchain",
    "langchain_community",
    "llama_index",
    "ray",
    "opencompass",
)


def is_hybrid(unit: Unit, project: Project) -> bool:
    """A switch or any other variable of the hybrid engine, ``lvllm serve``, or an lvllm dependency."""
    if unit.launcher == "lvllm serve" or any(HYBRID_NAMES.match(n) for n in unit.env):
        return True
    return any(d.name == "lvllm" for d in project.dependencies) and unit.framework is None


def detect(unit: Unit, project: Project) -> str | None:
    """The mode of a unit, or None if nothing says how it runs."""
    for mode, rule in ((COLOCATE, _colocate), (SERVER, _server), (FRAMEWORK, _framework)):
        if rule(unit, project):
            return mode
    if unit.serves:
        return SERVE
    if unit.launcher in ("LLM", "engine", "config"):
        return OFFLINE
    return None


def _key(unit: Unit, name: str) -> object:
    fact = unit.keys.get(name)
    return None if fact is None else fact.value


def _colocate(unit: Unit, project: Project) -> bool:
    framework = unit.framework
    if framework == "trl" and unit.launcher != "trl vllm-serve":
        mode = _key(unit, "vllm_mode")
        if mode is not None:
            return mode == "colocate"
        version = of_package(project.dependencies, "trl", unit.site.file)
        old = any(k in unit.keys for k in ("vllm_device", "vllm_server_host", "vllm_server_base_url"))
        return not old and (not version.known or version.at_least("1.0"))
    if framework == "verl":
        return not (number(_key(unit, "nnodes")) or 0) > 0
    if framework == "openrlhf":
        together = boolean(_key(unit, "train.colocate_all")) is True
        return together and boolean(_key(unit, "train.async_enable")) is not True
    if framework == "swift":
        mode = _key(unit, "vllm_mode")
        sleeping = (number(_key(unit, "sleep_level")) or 0) > 0
        return unit.launcher == "swift rlhf" and (mode == "colocate" or (mode != "server" and sleeping))
    if framework == "unsloth":
        return True
    names_called = {c.name for c in unit.calls}
    return unit.launcher in ("LLM", "engine") and {"sleep", "wake_up", "optimizer_step"} <= names_called


def _server(unit: Unit, project: Project) -> bool:
    framework = unit.framework
    if unit.launcher == "trl vllm-serve":
        return True
    if framework == "trl":
        return True
    if framework == "swift":
        return unit.launcher == "swift rollout" or _key(unit, "vllm_mode") == "server"
    if framework in ("openrlhf", "verl"):
        return True
    if unit.framework is not None or not unit.serves:
        return False
    if "weight_transfer_config" in unit.settings:
        return True
    if project.own_servers:
        return False  # the trainers of this project bring their own server
    return any(paired(unit, trainer, project) for trainer in project.trainers)


def paired(one: Unit, two: Unit, project: Project) -> bool:
    """Whether two units are a trainer and the server that it talks to: same address, and near each other."""
    trainer, server = (two, one) if one.serves else (one, two)
    if trainer.serves or not server.serves or not _talks_to(trainer, server):
        return False
    if trainer.site.file == server.site.file:
        return True
    trainers = [u for u in project.trainers if not u.documentation]
    servers = [u for u in project.units if u.serves and not u.documentation]
    folder = posixpath.dirname(trainer.site.file)
    if posixpath.dirname(server.site.file) == folder:
        trainers = [u for u in trainers if posixpath.dirname(u.site.file) == folder]
        servers = [u for u in servers if posixpath.dirname(u.site.file) == folder]
    return len(trainers) == 1 and len(servers) == 1


def same_host(trainer: Unit) -> bool:
    """False if the trainer names another host as its server's."""
    host = str(_key(trainer, "vllm_server_host") or _key(trainer, "vllm_server_base_url") or "localhost")
    return any(local in host for local in ("localhost", "127.0.0.1", "0.0.0.0", "[::1]"))


def _talks_to(trainer: Unit, server: Unit) -> bool:
    """A trainer in server mode whose address matches the server's."""
    if trainer.framework not in ("trl", "swift") or _key(trainer, "vllm_mode") not in ("server", None):
        return False
    if (
        trainer.framework == "trl"
        and _key(trainer, "vllm_mode") is None
        and "vllm_device" not in trainer.keys
    ):
        return False
    default_port = names.table("options")["defaults"]["port"]
    base = _key(trainer, "vllm_server_base_url")
    port = number(_key(trainer, "vllm_server_port")) or default_port
    if isinstance(base, str):
        match = re.search(r":(\d+)(?:/|$)", base)
        port = float(match.group(1)) if match else default_port
    own = server.settings.get("port")
    return (number(own.value) if own is not None else default_port) == port


def _framework(unit: Unit, _project: Project) -> bool:
    return unit.framework in _INTEGRATED
