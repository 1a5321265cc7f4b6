"""The layouts of the matrix; a new one is one line here."""

from __future__ import annotations

from tests.layouts.samples import ACROSS, CONTEXT, DOCUMENTS, EXPERTS, FEW, SHARDED, STAGED, THREE_STAGES
from tests.layouts.shapes import Layout

ESLM_OF_MICRO = "eslm-micro-skip"
"""Its reference must have the micro-batches of its layouts."""

LAYOUTS = {
    "one": Layout(deep=True, evaluate=True),
    "one-batch1": Layout(batch=1, deep=True, every=False, sample=(*FEW, ESLM_OF_MICRO), evaluate=True),
    "one-documents": Layout(batch=1, deep=True, every=False, sample=ACROSS + DOCUMENTS, evaluate=True, documents=True),
    "one-batch4-recompute": Layout(batch=4, recompute="layer", every=False),
    "one-recompute-some": Layout(recompute="layer", parts=1, offload=True, every=False, sample=(*FEW, "freqkv-gqa")),
    "tp2": Layout(tensor=2, every=False, sample=FEW),
    "tp2-sp": Layout(tensor=2, sequence=True, batch=4, evaluate=True),
    "tp2-sp-recompute": Layout(tensor=2, sequence=True, recompute="layer", offload=True, every=False, sample=FEW),
    "pp2": Layout(pipeline=2, deep=True, without=THREE_STAGES + SHARDED, sample=()),
    "pp2-batch1": Layout(pipeline=2, batch=1, every=False, sample=FEW),
    "pp2-recompute": Layout(pipeline=2, recompute="layer", offload=True, every=False, sample=FEW),
    "dp2": Layout(data=2, every=False, sample=FEW),
    "dp2-overlap": Layout(data=2, batch=1, overlap=True, every=False, sample=FEW),
    "dp2-distopt-overlap": Layout(
        data=2, batch=1, distributed_optimizer=True, overlap=True, every=False, sample=ACROSS, methods=True
    ),
    "pp3": Layout(pipeline=3, batch=1, deep=True),
    "pp4": Layout(pipeline=4, batch=1, deep=True, every=False),
    "tp4-sp": Layout(tensor=4, sequence=True, every=False, sample=("depth-skip",)),
    "tp2-pp2": Layout(tensor=2, pipeline=2, every=False, sample=("ponderlm-pythia", "everything-llama")),
    "tp2-sp-pp2-recompute": Layout(
        tensor=2, pipeline=2, sequence=True, recompute="layer", deep=True, every=False, sample=ACROSS, evaluate=True
    ),
    "dp2-pp2-distopt-overlap": Layout(
        data=2, pipeline=2, batch=1, distributed_optimizer=True, overlap=True, every=False, sample=FEW, evaluate=True
    ),
    "tp2-sp-documents": Layout(tensor=2, sequence=True, every=False, sample=ACROSS, evaluate=True, documents=True),
    "pp2-documents": Layout(
        pipeline=2, recompute="layer", deep=True, every=False, sample=(*FEW, "parcae-llama"), documents=True
    ),
    "dp2-documents": Layout(data=2, every=False, sample=FEW, documents=True),
    "cp2": Layout(context=2, batch=1, deep=True, every=False, sample=(*CONTEXT, "depth-skip"), evaluate=True),
    "cp2-documents": Layout(
        context=2, recompute="layer", deep=True, every=False, sample=DOCUMENTS, evaluate=True, documents=True
    ),
    "cp2-tp2-sp": Layout(context=2, tensor=2, sequence=True, deep=True, every=False, sample=("ponderlm2-llama-gqa",)),
    "cp2-tp2-sp-documents": Layout(
        context=2, tensor=2, sequence=True, deep=True, every=False, sample=("adaponderlm-llama-gqa",), documents=True
    ),
    "cp2-pp2": Layout(context=2, pipeline=2, batch=1, deep=True, every=False, sample=("everything-llama",)),
    "cp2-pp2-documents": Layout(context=2, pipeline=2, deep=True, every=False, sample=(), documents=True),
    "cp2-dp2-distopt-overlap": Layout(
        context=2,
        data=2,
        batch=1,
        distributed_optimizer=True,
        overlap=True,
        every=False,
        sample=("vanilla-pythia", "eslm-global", "eslm-micro-skip"),
    ),
    "ep2": Layout(data=2, experts=2, batch=1, overlap=True, every=False, sample=EXPERTS),
    "ep2-distopt-recompute": Layout(
        data=2, experts=2, distributed_optimizer=True, recompute="layer", every=False, sample=EXPERTS
    ),
    "ep2-tp2": Layout(tensor=2, experts=2, expert_tensor=1, every=False, sample=EXPERTS[:1]),
    "ep2-tp2-sp": Layout(tensor=2, experts=2, expert_tensor=1, sequence=True, every=False, sample=EXPERTS),
    "ep2-cp2": Layout(context=2, experts=2, every=False, sample=()),
    "ep2-pp2": Layout(data=2, pipeline=2, experts=2, batch=1, every=False, sample=STAGED),
    "ep2-etp2-sp": Layout(data=2, tensor=2, experts=2, sequence=True, every=False, sample=EXPERTS[:1]),
    "ep2-etp2": Layout(data=2, tensor=2, experts=2, every=False, sample=()),
    "ep2-tp2-sp-pp2": Layout(
        tensor=2,
        pipeline=2,
        experts=2,
        expert_tensor=1,
        sequence=True,
        recompute="layer",
        every=False,
        sample=STAGED[::3],
    ),
    "ep2-dp4-distopt": Layout(data=4, experts=2, distributed_optimizer=True, batch=1, every=False, sample=()),
    "cp3": Layout(context=3, deep=True, every=False, sample=()),
    "cp3-documents": Layout(context=3, deep=True, every=False, sample=(), documents=True),
}
