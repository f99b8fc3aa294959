import os

from trl import GRPOConfig, GRPOTrainer

os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"

config = GRPOConfig(output_dir="out", use_vllm=True, vllm_mode="server")

if __name__ == "__main__":
    GRPOTrainer(model="Qwen/Qwen2.5-7B-Instruct", args=config, reward_funcs=len).train()
