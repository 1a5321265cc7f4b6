"""What breaks a rule of the data."""

from __future__ import annotations

from megaponder.config.method_facts import MethodFacts
from tests.config.make import Broken, broken

DATA: list[Broken] = [
    broken("data.sequence_length", "max_positions = 2048; the nearest is 2048", data__sequence_length=4096),
    broken("data.sequence_length", "max_positions = 1024", model__preset="gpt2-small"),
    broken("data.sequence_length", "at least 1", data__sequence_length=0),
    broken("data.eod_id", "an id of the vocabulary", data__eod_id=50304),
    broken("ponder.options.topk", "at most model.vocab_size", facts=MethodFacts(token_counts={"topk": 60000})),
    broken(
        "ponder.options.pause_token_id", "nearest is 50303", facts=MethodFacts(token_rows={"pause_token_id": 50304})
    ),
    broken("data.split", "three numbers", data__split="9,1"),
    broken("data.split", "three numbers", data__split="9,x,1"),
    broken("data.split", "training part", data__split="0,9,1"),
    broken("data.split", "validation part", data__split="9,0,1"),
    broken("train.seed", "the nearest is 2147483647", train__seed=2**31),
    broken("data.shuffle_seed", "the nearest is 2147483647", data__shuffle_seed=2**31),
    broken("data.train", "a weight before each; for example [1.0, a, 1.0, b]", data__train=["a", "b"]),
    broken("data.train", "weight path", data__train=["a", 0.5]),
    broken("data.train", "weight path", data__train=[0.5, "a", "b"]),
    broken("data.valid", "all weights are 0", data__valid=[0.0, "a"]),
    broken("data.valid", "no weight may be below 0", data__valid=[-1.0, "a"]),
    broken("data.accept_changed", "neither data.train nor data.valid", data__accept_changed=["nowhere"]),
    broken("data.document_tokens", "sees its whole sample; leave it out (null), or", data__document_tokens=100.0),
    broken(
        "data.document_tokens",
        "no longer than data.sequence_length = 512; the nearest is 512",
        data__document_tokens=513.0,
        data__document_attention=True,
        data__sequence_length=512,
    ),
]
