"""What FreqKV changes in a plan: the keys that a token sees, the compressions, and the copies that attention keeps."""

from __future__ import annotations

import math

from megaponder.config.model import ModelConfig
from megaponder.decoding.freqkv_blocks import BY_MATRIX, FreqKV, read


def mean_keys(model: ModelConfig, tokens: float) -> float | None:
    """Keys that a token of a text of so many sees, mean over them; None where all of them are seen."""
    f = read(model.freqkv)
    if f is None or tokens <= f.capacity:
        return None
    whole, rest = divmod(tokens - f.memory, f.hop)

    def ending(n: float) -> float:
        """Of n tokens of one block, or of those before the first."""
        return n * (n + 1) / 2

    beyond = whole * ending(f.hop) + ending(rest) + (tokens - f.memory) * f.memory
    return (ending(f.memory) + beyond) / tokens


def compression_flops(model: ModelConfig, tokens: float) -> float:
    """Forward FLOPs per token and layer of a text of so many: each compression of N rows to L, of keys and values."""
    f = read(model.freqkv)
    if f is None or tokens <= f.capacity:
        return 0.0
    return 2 * model.key_width * _channel(f) * f.events(math.ceil(tokens)) / tokens


def _channel(f: FreqKV) -> float:
    """One compression of one channel: a matrix of L x N, or two real FFTs (2.5 n log2 n each, and their turns)."""
    if f.span <= BY_MATRIX:
        return 2.0 * f.span * f.kept
    return sum(2.5 * n * math.log2(n) + 6 * n for n in (f.span, f.kept))


def copied_bytes(model: ModelConfig, tokens: int, e: int, documents: bool) -> float:
    """What one row keeps beside what plain attention keeps, elements of e bytes, in sequences of so many tokens.

    Keys and values of full blocks of C rows, and of one that is not, stand for those of the tokens, and outputs are put
    together once more; with documents a second attention over tiles keeps its own queries, two tiles of keys and
    values, and outputs.
    """
    f = read(model.freqkv)
    if f is None or tokens <= f.capacity:
        return 0.0
    if documents:
        blocks = tokens // min(f.hop, f.memory + 1)
        rows = blocks * (2 * f.capacity + 2 * f.hop) + 6 * tokens
        return model.query_width * e * (rows / tokens - 3)  # the output of both is one of the four of plain attention
    full, last = divmod(tokens - f.memory, f.hop)
    rows = 2 * (f.memory + full * f.capacity + (f.memory + last if last else 0))
    return model.query_width * e * (rows / tokens - 2 + 1)
