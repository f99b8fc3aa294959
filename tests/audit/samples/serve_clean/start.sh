#!/bin/bash
set -euo pipefail

vllm serve Qwen/Qwen3-8B --max-model-len 8192
