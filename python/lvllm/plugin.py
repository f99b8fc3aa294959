"""Entry point of the group `vllm.general_plugins`. Imports nothing beyond the standard library by itself.

vLLM logs and swallows an exception raised while an entry point is *imported*, and would then serve without
us. So this module cannot fail to import, and everything that can fail does so inside register(), whose
exceptions end the start.
"""

from __future__ import annotations

import sys

from lvllm import envs, host


def register() -> None:
    """Install the hooks in this process when the master switch is on; else touch nothing. Idempotent."""
    if not envs.switch_is_on():
        if name := envs.misspelt_switch():
            print(
                f"lvllm: {name} is not a setting; did you mean {envs.SWITCH.name}? It is off.",
                file=sys.stderr,
            )
        return
    envs.load()
    host.publish_inherited_cpus()
    host.quiet_openmp()
    from lvllm.vllm import install

    install.install()
