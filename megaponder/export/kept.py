"""What a run folder keeps of the Hugging Face folder that it was imported from, for exports of what was not trained.

Training puts nothing but EOD between documents, which makes it BOS and EOS of what was trained (`tokenizer`).  A model
that was only imported has seen what its own folder says, so its export says the same: special ids, the sampling
defaults of generation_config.json, and a tokenizer that adds the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaponder.export.folder import read_json, write_json

CONFIG, GENERATION = "imported_config.json", "imported_generation_config.json"
ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SAME = (*ENDS, "initializer_range", "init_std")


@dataclass(frozen=True)
class Kept:
    """Of one folder."""

    config: dict[str, Any]
    """Fields that mean the same in every format, where its config.json has them."""
    generation: dict[str, Any]
    """generation_config.json."""
    dtype: str
    """That of its weights, as its config.json says."""


def read(hf: dict[str, Any], source: Path, vocabulary: int) -> tuple[dict[str, dict[str, Any]], str]:
    """What to keep, by the names that it has in a run folder: config.json, which is `hf`, and generation_config.json if
    the folder has one; and a sentence about ids that are left out, since no token of the vocabulary has them.

    UserError if a file cannot be read.
    """
    path = source / "generation_config.json"
    there = path.exists() or path.is_symlink()
    found = {CONFIG: dict(hf)} | ({GENERATION: read_json(source, path.name)} if there else {})
    lost: dict[str, None] = {}
    for fields in found.values():
        for name in ENDS:
            value = fields.get(name)
            ids: list[Any] = value if isinstance(value, list) else [value]
            beyond = [i for i in ids if type(i) is int and not 0 <= i < vocabulary]
            if beyond:
                left = [i for i in ids if i not in beyond]
                fields[name] = left if len(left) > 1 else left[0] if left else None
                lost |= {f"{name} = {i}": None for i in beyond}
    if not lost:
        return found, ""
    return found, f"Left out, since the vocabulary has {vocabulary:,} tokens: {', '.join(lost)}."


def keep(found: dict[str, dict[str, Any]], run: Path) -> None:
    """Write it; what an earlier import left there is gone."""
    (run / GENERATION).unlink(missing_ok=True)
    for name, fields in found.items():
        write_json(run / name, fields)


def of(run: Path, step: int) -> Kept | None:
    """What was kept, if the checkpoint of this step is the import itself."""
    if step or not (run / CONFIG).is_file():
        return None
    fields = read_json(run, CONFIG)
    config = {name: value for name, value in fields.items() if name in _SAME and _plain(value)}
    there = (run / GENERATION).is_file()
    # words name what transformers would fetch or run, so only numbers come along
    generation = {n: v for n, v in read_json(run, GENERATION).items() if _plain(v)} if there else {}
    return Kept(config, generation, str(fields.get("dtype", fields.get("torch_dtype"))))


def _plain(value: Any) -> bool:
    """A number, a switch, null or a list of numbers."""
    parts = value if isinstance(value, list) else [value]
    return all(part is None or isinstance(part, bool | int | float) for part in parts)
