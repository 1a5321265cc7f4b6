"""Groups of parameters by which `train.only` says what is trained; names as `backbone.init.global_names` gives them."""

from __future__ import annotations

from collections.abc import Collection

OF_LAYERS = ("attention", "norms", "mlp", "experts", "shared_expert", "routers")
"""Groups that every pipeline stage has."""
GROUPS = (*OF_LAYERS, "embeddings", "method")
"""attention: projections with their biases; norms: all of them; mlp: matrices and biases of MLPs, experts and shared
ones among them; experts, shared_expert, routers: of a mixture; embeddings: tokens, positions and head; method: the
pondering method's own."""
OF_MIXTURES = ("experts", "shared_expert", "routers")


def groups_of(name: str) -> tuple[str, ...]:
    """The groups of a parameter; every one has at least one."""
    if name.startswith("method_"):  # ponder.base.PARAMETER_PREFIX
        return ("method",)
    if "layer_norm_" in name or "layernorm." in name or name.startswith("final_norm."):
        return ("norms",)
    if ".self_attention." in name:
        return ("attention",)
    for part, group in ((".router.", "routers"), (".experts.", "experts"), (".shared_experts.", "shared_expert")):
        if f".mlp{part}" in name:
            return (group,) if group == "routers" else ("mlp", group)
    return ("mlp",) if ".mlp." in name else ("embeddings",)


def is_trained(name: str, only: Collection[str]) -> bool:
    """Whether `train.only` = `only` trains a parameter."""
    return not only or any(group in only for group in groups_of(name))
