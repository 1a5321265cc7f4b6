"""llama.cpp's public converter: python convert_gguf.py SOURCE FOLDER OUT.gguf, with its Python package gguf in SOURCE.

Two of its habits do not fit: it knows byte-level tokenizers by a hash of their output, which no newly trained one has
(set here: that of GPT-2), and it reads config.json through transformers, whose newest releases drop fields it wants.
"""

import json
import runpy
import sys
from pathlib import Path


def _fields(folder: Path) -> dict:
    fields = json.loads((folder / "config.json").read_text())
    return {"n_ctx": fields.get("n_positions"), **fields}


def main(source: str, folder: str, out: str) -> None:
    sys.path[:0] = [f"{source}/gguf-py", source]
    import conversion.base as base

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    base.ModelBase.load_hparams = staticmethod(lambda path, is_mistral_format=False, guess=True: _fields(Path(path)))
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outtype", "f32", "--outfile", out]
    runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
