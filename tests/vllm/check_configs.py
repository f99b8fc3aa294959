"""Build several engine configurations in one process and report each one's error: a test's subprocess.

    python check_configs.py '[{"engine": {"model": DIR, ...}, "environ": {...}}, ...]'

Prints a JSON list with the text of the error of each job, or null where the configuration was accepted.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    from vllm import EngineArgs

    errors: list[str | None] = []
    for job in json.loads(sys.argv[1]):
        os.environ.update(job["environ"])
        try:
            EngineArgs(dtype="float32", max_model_len=256, **job["engine"]).create_engine_config()
            errors.append(None)
        except Exception as error:  # the kind of error is part of what is reported
            errors.append(f"{type(error).__name__}: {error}")
        for name in job["environ"]:
            del os.environ[name]
    print("\n" + json.dumps(errors))


if __name__ == "__main__":
    main()
