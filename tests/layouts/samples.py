"""Cases that stand for the others, by name; `MEGAPONDER_WHOLE_MATRIX=1` runs all (`cases.py`)."""

REPRESENTATIVES = (
    "vanilla-llama-tied",
    "ponderlm-pythia",
    "ponderlm2-llama-gqa",
    "adaptive-cot-skip-gqa",
    "qk-norm-gqa",
    "sandwich-gqa",
    "huginn-llama",
    "parcae-llama",
    "depth-across-gqa",
    "everything-llama",
    "everything-deep",
    "eslm-global",
)
ACROSS = tuple(n for n in REPRESENTATIVES if n not in ("vanilla-llama-tied", "qk-norm-gqa", "sandwich-gqa"))
"""Where ranks share layers and more besides: the others' norms and table are as where they share layers alone, and
Huginn's table is tied as well."""
FEW = ("ponderlm-pythia", "adaptive-cot-skip-gqa", "huginn-llama", "depth-across-gqa", "everything-llama")
"""In layouts that differ in one respect from others that run more."""
SIMILAR = (
    "vanilla-pythia",
    "loop-llama-gqa",
    "ponderlm-newest-gentle",
    "ponderlm3-llama-gqa",
    "ponderlm3-pythia-deep",
    "adaponderlm-llama-gqa",
    "adaponderlm-pythia-deep",
    "adaptive-cot-llama-gqa",
    "adaptive-cot-pythia-deep",
    "pruned-pythia",
    "confident-pythia",
    "nanbeige-split",
    "ouro-deep",
)
"""On ranks of one kind, another case of the method does all that these do; three stages have them all."""
THREE_STAGES = (
    "adaponderlm-skip",
    "adaponderlm-budget-skip",
    "depth-within-deep",
    "depth-blocks-deep",
    "huginn-llama",
    "retrofit-llama",
    "parcae-llama",
    "nanbeige-shared",
    "everything-deep",
)
"""Their layers are enough for three stages, which cross what two cross; recomputed ones of two and four are samples."""
SHARDED = (
    "features-serial",
    "features-parallel",
    "qk-norm-gqa",
    "sandwich-gqa",
    "post-norm-all-heads",
    "stream-norm-qk-bias",
    "window-yarn-gqa",
    "freqkv-gqa",
    "ponderlm-topk-gpt2-tied",
    "adaponderlm-budget",
    "moe-skip",
)
"""What they have beyond others is inside a layer or a pass: ranks that share a layer differ in it, stages do not."""
CONTEXT = (
    "vanilla-llama-tied",
    "ponderlm3-pythia-deep",
    "adaptive-cot-skip-gqa",
    "features-parallel",
    "huginn-llama",
    "eslm-entropy-losses",
    "eslm-micro-skip",
)
"""What ranks that share sequences do each in its own way: rows, key bias, a sum over a sequence, sets of keys, gathered
rows, learned positions, noise."""
EXPERTS = ("moe-loop-gqa", "moe-bias-latents")
STAGED = (*EXPERTS, "moe-routers-skip", "moe-routers-latents")
"""Where stages pass on rows of experts, too."""
DOCUMENTS = ("window-yarn-gqa", "adaponderlm-llama-gqa", "adaptive-cot-llama-gqa", "parcae-llama")
"""With documents: masks, windows, a share of a document's tokens, draws."""
