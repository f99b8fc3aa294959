from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

config = GRPOConfig(
    output_dir="out",
    use_vllm=True,
    vllm_mode="colocate",
    vllm_gpu_memory_utilization=0.75,
    max_completion_length=512,
)

if __name__ == "__main__":
    trainer = GRPOTrainer(
        model="Qwen/Qwen2.5-7B-Instruct",
        args=config,
        reward_funcs=lambda completions, **kwargs: [float(len(c)) for c in completions],
        train_dataset=load_dataset("trl-lib/tldr", split="train"),
    )
    trainer.train()
