import os

from vllm import LLM, SamplingParams

os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"

llm = LLM(
    "meta-llama/Llama-3.3-70B-Instruct",
    tensor_parallel_size=2,
    data_parallel_size=2,
    enforce_eager=True,
)
params = SamplingParams(best_of=2, max_tokens=512)

for output in llm.generate(["What is a mixture of experts?"], params):
    print(output.outputs[0].text)
