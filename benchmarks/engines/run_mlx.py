"""mlx-lm on a CPU: python run_mlx.py FOLDER PROMPTS.json OUT.npz, by the Python of its own environment."""

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model


def main(folder: str, given: str, out: str) -> None:
    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(folder))
    with open(given) as file:
        asked = json.load(file)
    found = {}
    for i, prompt in enumerate(asked["prompts"]):
        cache = make_prompt_cache(model)
        logits = np.array(model(mx.array([prompt]), cache=cache)[0].astype(mx.float32)).astype(np.float64)
        top = logits.max(-1, keepdims=True)
        found[f"logprobs{i}"] = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
        text = [int(logits[-1].argmax())]
        while len(text) < asked["new"]:
            text.append(int(mx.argmax(model(mx.array([[text[-1]]]), cache=cache)[0, -1]).item()))
        found[f"text{i}"] = np.array(text)
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
