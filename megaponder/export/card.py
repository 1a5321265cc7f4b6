"""The model card (README.md) of an export folder."""

from __future__ import annotations

from pathlib import Path
from string import Template

from megaponder import __version__
from megaponder.checkpoint.state import TrainState
from megaponder.config.schema import RunConfig
from megaponder.export import compose, configs, looped, targets
from megaponder.export.requirements import TESTED
from megaponder.export.tokenizer import TokenizerFiles
from megaponder.monitor import jsonl

CARD = Template("""---
library_name: transformers
pipeline_tag: text-generation
tags: [megaponder, $method]
license: $license
---

# $title

| | |
|---|---|
| method | `$method` $options |
| shape | $parameters parameters, $layers layers, width $hidden, $heads heads, vocabulary $vocab, $positions positions |
| embedding scale | $scale |
| trained with | megaponder $version, $step steps, $seen tokens |
| data | $data |
| evaluation | $evaluation |
| licence of the weights | $licence_words |
| runs with | transformers $oldest to $newest (tested) |

$refitted

$usage
$prefix

Logits of this folder, with and without cache, were compared with the checkpoint's own forward before it was published:
largest difference $difference of the largest logit (FP32).
$note""")


USAGE = Template("""```python
$imports

model = AutoModelForCausalLM.from_pretrained("$folder"$trust)
$prompt
```

Scores: `lm_eval --model hf --model_args pretrained=$folder$lm_eval --tasks TASKS` (extra `megaponder[eval]`).""")
TEXT = """tokenizer = AutoTokenizer.from_pretrained("$folder")
ids = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=50)[0]))"""
IDS = """print(model.generate(torch.tensor([[0]]), max_new_tokens=50)[0])"""
NANBEIGE = """transformers alone does not run this format; convert it with `convert_hf_to_gguf.py` of llama.cpp, or
load it with MLX or SGLang, as the Nanbeige model that it is to them."""


PUBLIC = """transformers alone does not run this format: copy the modelling files of the public $architecture into this
folder and load it with `trust_remote_code=True`. `megaponder import` and `megaponder generate` need no such files."""


def usage(name: str, native: bool, target: str | None, tokenizer: bool) -> str:
    """How to run the folder."""
    if target == targets.NANBEIGE:
        return NANBEIGE
    if target in looped.KINDS:
        return Template(PUBLIC).substitute(architecture=looped.KINDS[target].architecture)
    first = "from transformers import AutoModelForCausalLM"
    return USAGE.substitute(
        imports=f"{first}, AutoTokenizer" if tokenizer else f"import torch\n{first}",
        prompt=Template(TEXT if tokenizer else IDS).substitute(folder=name),
        folder=name,
        trust="" if native else ", trust_remote_code=True",
        lm_eval="" if native else ",trust_remote_code=True",
    )


def evaluation(run: Path, step: int) -> str:
    """The newest validation loss of a run up to a step."""
    rows = jsonl.read(run / jsonl.NAME, ("step",))
    found = [row for row in rows if type(row.get("validation_loss")) is float and row["step"] <= step]
    if not found:
        return "none was recorded"
    return f"loss {found[-1]['validation_loss']:.4f} nats per token on held-out data, after step {found[-1]['step']}"


def write(
    cfg: RunConfig,
    path: Path,
    *,
    native: bool,
    target: str | None,
    state: TrainState,
    run: Path,
    licence: str | None,
    parameters: int,
    tokens: TokenizerFiles,
    difference: float,
    refitted: str = "",
    untrained: bool = False,
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
    if untrained:
        prefix = (
            "This model was imported and not trained since: special ids, sampling defaults and what its tokenizer\n"
            "adds to a text are those of the folder that it came from."
        )
    blend = [str(word) for word in cfg.data.train]
    text = CARD.substitute(
        method=cfg.ponder.method,
        title=f"{cfg.model.preset or cfg.model.family} ({cfg.ponder.method})",
        parameters=f"{parameters:,}",
        layers=cfg.model.num_layers,
        hidden=cfg.model.hidden_size,
        vocab=cfg.model.vocab_size,
        heads=cfg.model.num_heads,
        positions=cfg.model.max_positions,
        step=f"{state.step:,}",
        seen=f"{state.tokens:,}",
        data=", ".join(f"`{Path(word).name}`" if "/" in word else f"`{word}`" for word in blend) or "not recorded",
        evaluation=evaluation(run, state.step),
        license=licence or "other",
        licence_words=licence or "not said; ask whoever trained it",
        oldest=TESTED[0],
        newest=TESTED[1],
        usage=usage(name, native, target, tokens.source is not None),
        version=__version__,
        options=options or "",
        scale=f"{configs.scale_of(cfg):g}",
        prefix=prefix,
        difference=f"{difference:.1e}",
        refitted=refitted,
        note=Template(compose.decoding_class(cfg.ponder.method).note).substitute(options),
    )
    (path / "README.md").write_text(text, encoding="utf-8")
