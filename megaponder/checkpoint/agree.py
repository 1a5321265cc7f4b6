"""Agreement of all ranks on a checkpoint: the first rank chooses, and each confirms that it sees the same.

A network file system may show a folder late, and a node may have a different disk mounted under the same path.  Ranks
that see different things retry for some seconds; then the run ends with a sentence that names rank and host, instead of
continuing from two states.  No checkpoint is skipped because only one rank does not see it.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megaponder.checkpoint import folder, manifest
from megaponder.checkpoint.choose import Choice, Source, first_intact, named
from megaponder.checkpoint.damage import damage, lost_link
from megaponder.checkpoint.manifest import Damage, Forbidden
from megaponder.errors import LostRank
from megaponder.ranks import Said, confirm, gather, on_first_rank, settle


def choose(root: Path) -> Choice:
    """`checkpoint.choose.choose` by all ranks together."""
    first, *others = settle(lambda: [path.name for path in folder.published(root).values()])
    for other in others:
        if other.value != first.value:
            raise LostRank(
                f"The ranks do not see the same checkpoints in {root}: {other.who} sees {_newest(other.value)}, "
                f"{first.who} sees {_newest(first.value)}; check whether that node's file system lags, and restart."
            )
    return first_intact([root / name for name in first.value], agreed_damage)


def locate(path: str) -> Path:
    """`checkpoint.choose.locate` by all ranks together."""
    source: Source = on_first_rank(lambda: named(path))
    return source.intact(agreed_damage, warn=dist.get_rank() == 0)


def agreed_damage(path: Path) -> Damage | None:
    """`damage`, with the reading divided among all ranks and the same answer on all of them.

    LostRank if a rank keeps seeing something different from the first rank.
    """
    first, *others = settle(lambda: _seen(path))
    for other in others:
        if other.value[:2] == first.value[:2]:
            names = [name for name, sample in other.value[2].items() if sample != first.value[2].get(name)]
            if names:
                raise _not_alike(path, other, f"{names[0]} has other bytes", first)
        if other.value != first.value:
            odd, than = (first, other) if first.value[1] and not other.value[1] else (other, first)
            raise _not_alike(path, odd, odd.value[1] or f"its {manifest.MANIFEST} is different", than)
    if first.value[1] is not None:
        return first.value[1]
    said = gather(damage(path, dist.get_rank(), dist.get_world_size()))
    found = [s for s in said if s.value is not None]
    for s in found:
        if isinstance(s.value, Forbidden):
            return Forbidden(f"{s.value} ({s.who})")
        if s.rank == 0:
            return s.value
    if not found:
        return None
    names = sorted(s.value.file for s in found if s.value.file)
    if names and (reason := on_first_rank(lambda: _first_changed(path, names))) is not None:
        return reason
    if (left := confirm(lambda: damage(path, dist.get_rank(), dist.get_world_size()))) is not None:
        raise _not_alike(path, left, left.value, said[0])
    return None


def _seen(path: Path) -> tuple[str | None, Damage | None, dict[str, int]]:
    """What a rank sees of a checkpoint: the manifest, what is missing, and samples of every file.

    Checksums of whole files are divided among the ranks, so that alone would not find a node that sees other bytes.
    """
    reason = lost_link(path) or manifest.outline(path)
    return manifest.digest(path), reason, {} if reason else manifest.samples(path)


def _not_alike(path: Path, odd: Said, why: str, than: Said) -> LostRank:
    return LostRank(
        f"Checkpoint {path} is not the same on all ranks: {odd.who} finds that {why}, {than.who} does not; check "
        "whether that node's file system lags or shows another disk, and restart."
    )


def _first_changed(path: Path, names: list[str]) -> Damage | None:
    listed = manifest.listed(path)
    return next((found for name in names if (found := manifest.changed(path, name, listed[name], fresh=True))), None)


def _newest(names: list[str]) -> str:
    return f"{len(names)}, the newest of them {names[0]}" if names else "none"
