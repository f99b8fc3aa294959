#!/bin/bash
export CUDA_VISIBLE_DEVICES=0,1
vllm serve Qwen/Qwen2.5-7B-Instruct -tp 2 --host 0.0.0.0 --max-model-len 8192
