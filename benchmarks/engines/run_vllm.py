"""vLLM on a CPU: python run_vllm.py FOLDER PROMPTS.json OUT.npz, by the Python of vLLM's own environment.

Environment: MEGAPONDER_TP, the tensor-parallel size (1); MEGAPONDER_MODEL_IMPL, whose model class runs (auto: the
plugin's or vLLM's own; transformers: that of its transformers backend).
"""

import json
import os
import sys

import numpy as np

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
RANKS = int(os.environ.get("MEGAPONDER_TP", "1"))
if RANKS == 1:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
else:  # a core for each; vLLM itself wants a NUMA node for each
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, sorted(os.sched_getaffinity(0))[:RANKS])))


def main(folder: str, given: str, out: str) -> None:
    from vllm import LLM, SamplingParams

    with open(given) as file:
        asked = json.load(file)
    engine = LLM(
        folder,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        trust_remote_code=True,
        skip_tokenizer_init=True,
        max_logprobs=4096,
        enable_prefix_caching=False,
        tensor_parallel_size=RANKS,
        model_impl=os.environ.get("MEGAPONDER_MODEL_IMPL", "auto"),
        max_num_batched_tokens=256,
    )
    how = SamplingParams(
        temperature=0, max_tokens=asked["new"], ignore_eos=True, prompt_logprobs=-1, logprobs=-1, detokenize=False
    )
    found = {}
    for i, done in enumerate(engine.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], how)):
        rows = [*done.prompt_logprobs[1:], done.outputs[0].logprobs[0]]
        size = max(rows[0]) + 1
        found[f"logprobs{i}"] = np.array([[row[token].logprob for token in range(size)] for row in rows])
        found[f"text{i}"] = np.array(done.outputs[0].token_ids)
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
