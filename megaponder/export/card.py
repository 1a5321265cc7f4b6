"""The model card (README.md) of an export folder."""

from __future__ import annotations

from pathlib import Path
from string import Template

from megaponder import __version__
from megaponder.config.schema import RunConfig
from megaponder.export import compose, configs
from megaponder.export.tokenizer import TokenizerFiles

CARD = Template("""---
library_name: transformers
pipeline_tag: text-generation
tags: [megaponder, $method]
---

# $title

$parameters parameters, $layers layers, width $hidden, vocabulary $vocab.
Trained for $step steps with megaponder $version.
Method: `$method` $options.  Embedding scale: $scale.
$refitted

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("$folder"$trust)
tokenizer = AutoTokenizer.from_pretrained("$folder")
ids = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=50)[0]))
```

Evaluation: `lm_eval --model hf --model_args pretrained=$folder$lm_eval --tasks TASKS` (extra `megaponder[eval]`).
$prefix

Logits of this folder, with and without cache, were compared with the checkpoint's own forward before it was published:
largest difference $difference of the largest logit (FP32).
$note""")


def write(
    cfg: RunConfig,
    path: Path,
    *,
    native: bool,
    step: int | None,
    parameters: int,
    tokens: TokenizerFiles,
    difference: float,
    refitted: str = "",
) -> None:
    """Write README.md."""
    name = path.name.removeprefix(".").partition(".partial-")[0]
    options = configs.ponder_config(cfg, "", None)["method_options"]
    prefix = "The training data has no end-of-document token, so there is no BOS either."
    if tokens.eos_id is not None:
        prefix = (
            f"Documents were separated only by token {tokens.eos_id}: it is BOS and EOS here, an empty\n"
            "context starts with it, and no token is put in front of other texts (add_bos_token is false)."
        )
    text = CARD.substitute(
        method=cfg.ponder.method,
        title=f"{cfg.model.preset or cfg.model.family} ({cfg.ponder.method})",
        parameters=f"{parameters:,}",
        layers=cfg.model.num_layers,
        hidden=cfg.model.hidden_size,
        vocab=cfg.model.vocab_size,
        step="an unknown number of" if step is None else step,
        version=__version__,
        options=options or "",
        scale=f"{configs.scale_of(cfg):g}",
        folder=name,
        trust="" if native else ", trust_remote_code=True",
        lm_eval="" if native else ",trust_remote_code=True",
        prefix=prefix,
        difference=f"{difference:.1e}",
        refitted=refitted,
        note=Template(compose.decoding_class(cfg.ponder.method).note).substitute(options),
    )
    (path / "README.md").write_text(text, encoding="utf-8")
