"""``python -m lvllm.audit PATH``."""

import sys

from lvllm.audit.cli import main

sys.exit(main(sys.argv[1:]))
