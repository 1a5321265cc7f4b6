"""What breaks a rule of mixtures of experts."""

from __future__ import annotations

from typing import Any

from megaponder.config.method_facts import MethodFacts
from megaponder.config.rules import Machine
from tests.config.make import Broken, broken

H100 = Machine("cuda", (9, 0), transformer_engine=True, grad_accum_kernel=False)
TWO: dict[str, Any] = {"experts": 8, "top_k": 2}


def options(field: str, words: str, **moe: Any) -> Broken:
    """Options of a mixture that break a rule."""
    return broken(f"model.moe.{field}", words, model__moe=TWO | moe)


def labels(field: str, words: str, data: dict[str, Any], **changes: Any) -> Broken:
    """Disciplines of its experts that break a rule."""
    weight = {"weight": changes.pop("weight")} if "weight" in changes else {}
    return broken(field, words, train__disciplines={"data": data} | weight, **{"model__moe": TWO} | changes)


def only(field: str, words: str, groups: list[str], **changes: Any) -> Broken:
    """Groups of parameters that alone are trained, and break a rule."""
    return broken(field, words, train__only=groups, **changes)


MOE: list[Broken] = [
    options("size", "its options are experts, top_k, shared_ffn", size=4),
    broken("model.moe", "it needs experts, the number of experts of a layer; add experts: 8", model__moe={"top_k": 2}),
    broken("model.moe", "it needs top_k, the experts that a row takes; add top_k: 2", model__moe={"experts": 8}),
    options("experts", "at least 2; use 2", experts=1),
    options("top_k", "at least 1; use 1", top_k=0),
    options("shared_ffn", "a whole number of at least 0", shared_ffn=2.5),
    options("scale", "a number of more than 0", scale=0),
    options("aux_weight", "a number of at least 0", aux_weight=-0.1),
    options("bias_rate", "a number of at least 0", bias_rate=True),
    options("scale", "it is text, and must be a number of more than 0; write 2.5 without quotes", scale="2.5"),
    options("experts", "it is text, and must be a whole number of at least 2; use 2", experts="many"),
    options("score", "it must be softmax or sigmoid; use softmax", score="relu"),
    options("renormalise", "it must be true or false; use true", renormalise=1),
    options("routers", "it must be shared, per_pass, or a whole number of at least 2; use shared", routers=1),
    broken("model.moe.routers", "with vanilla a token runs 1 pass; use shared", facts=MethodFacts(),
           model__moe=TWO | {"routers": "per_pass"}),
    options("routers", "with vanilla a token runs 4 passes (or slots); use 4", routers=5),
    broken("model.moe.routers", "a token runs 3 passes (or slots); use 3", model__moe=TWO | {"routers": 4},
           facts=MethodFacts(max_passes=5, max_slots=3)),
    broken("model.moe.routers", "repeats some of the layers only", model__moe=TWO | {"routers": 2},
           facts=MethodFacts(max_passes=4, core=(4, 10))),
    options("top_k", "there are 8 experts; use 8", top_k=9),
    options("renormalise", "the router would have no gradient; use false", top_k=1),
    options("renormalise", "renormalises sigmoid scores", score="sigmoid", renormalise=False),
    options("bias_rate", "sigmoid scores only", bias_rate=0.1),
    broken("model.activation", "the experts are SwiGLU MLPs", model__activation="gelu", model__moe=TWO),
    broken("model.mlp_bias", "have no biases", model__mlp_bias=True, model__moe=TWO),
    broken(
        "precision.fp8",
        "FP8 of experts",
        model__moe=TWO,
        precision__fp8="current",
        precision__dtype="bf16",
    ),
    broken("optimizer.kind", "Muon is not built", model__moe=TWO, optimizer__kind="muon"),
    broken("precision.cuda_graphs", "known only when it is routed", model__moe=TWO, precision__cuda_graphs=True),
    broken(
        "parallel.sequence",
        "each tensor rank routes a part of the rows",
        world=2,
        model__moe=TWO,
        parallel__tensor=2,
        ponder__skip_halted=True,
    ),
    broken(
        "parallel.expert_tensor",
        "gloo gathers equal numbers of rows only",
        world=4,
        machine=Machine("cpu"),
        model__moe=TWO,
        parallel__tensor=2,
        parallel__sequence=True,
        parallel__experts=2,
        ponder__skip_halted=True,
    ),
    broken("parallel.experts", "there are no experts without model.moe", world=2, parallel__experts=2),
    broken("parallel.expert_tensor", "there are no experts without model.moe", parallel__expert_tensor=1),
    broken("parallel.experts", "divide model.moe.experts = 8; the nearest is 2", world=3, model__moe=TWO,
           parallel__experts=3),
    broken("parallel.tensor", "divide model.ffn_size = 2048; the nearest is 2", world=3, model__moe=TWO,
           parallel__tensor=3, model__num_heads=12, model__num_kv_heads=12, model__ffn_size=2048,
           model__vocab_multiple=96),
    broken("parallel.tensor", "divide model.moe.shared_ffn = 33; the nearest is 1", world=2,
           model__moe=TWO | {"shared_ffn": 33}, parallel__tensor=2),
    broken("parallel.expert_tensor", "it must be parallel.tensor = 2, over which", world=2, model__moe=TWO,
           parallel__tensor=2, parallel__expert_tensor=1),
    broken("parallel.experts", "with 1 rank for each expert, it must divide the 3 ranks of a stage; the nearest is 1",
           world=3, model__moe=TWO, parallel__experts=2),
    broken("parallel.experts", "with 2 ranks for each expert, it must divide the 4 ranks of a stage; the nearest is 2",
           world=4, model__moe=TWO, parallel__tensor=2, parallel__experts=4),
    broken("data.sequence_length", "a multiple of 2, so that tensor ranks route equal parts", world=2, model__moe=TWO,
           parallel__tensor=2, data__sequence_length=99),
    labels("train.disciplines", "there are no experts without model.moe; use {}", {"a": []}, model__moe={}),
    labels("train.disciplines.weight", "at least 0; use 0.01", {"a": [], "b": [], "c": [], "d": []}, weight=-1.0),
    labels("train.disciplines.data", "it must name the datasets", {"a": "data/a"}),
    labels("train.disciplines.data", "those named have 4 of the 8; name 4 of them", {"a": [], "b": []}),
    labels("train.disciplines.data.b", "it is a dataset of a, too", {"a": ["x"], "b": ["x.bin"], "c": [], "d": []}),
    only("train.only", "every layer needs something that is trained", ["embeddings"]),
    only("train.only", "groups are attention, norms, mlp,", ["mpl"]),
    only("train.only", "only a mixture of experts (model.moe) has it; use mlp", ["routers"]),
    only("train.only", "vanilla has no parameters of its own; leave it out", ["mlp", "method"]),
    only("precision.fp8", "FP8 weights that are not trained", ["mlp"], precision__fp8="current",
         precision__dtype="bf16", machine=H100),
    only("precision.cuda_graphs", "captured passes with weights that are not trained", ["mlp"],
         precision__cuda_graphs=True, machine=H100),
]  # fmt: skip
