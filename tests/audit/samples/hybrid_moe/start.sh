#!/bin/bash
export LVLLM_GPU_PREFILL_MIN_BATCH_SIZE=8192
export LVLLM_GPU_RESIDENT_MOE_LAYERS="0-5,3"

exec vllm serve Qwen/Qwen3-235B-A22B-FP8 \
  -tp 2 \
  --max-model-len 16384 \
  --max-num-batched-tokens 4096 \
  --cpu-offload-gb 20 \
  --enforce-eager
