"""Whether the run folder is one folder on all nodes: the first rank leaves a token in it, and every rank reads it back.

Without that, ranks on two nodes would write halves of checkpoints that nobody can load.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import torch.distributed as dist

from megaponder import files
from megaponder.errors import UserError
from megaponder.ranks import confirm, on_first_rank

_TOKEN = ".token-"


def places(run: Path) -> list[Path]:
    """The folders that all nodes must share: the run's, and that of its checkpoints, which may be a link elsewhere."""
    return [run, *(p for p in (run / "checkpoints",) if p.is_dir())]


def leave_token(folders: list[Path]) -> str:
    """Write a new word into a file of each folder; what killed starts have left there goes."""
    word = secrets.token_hex(8)
    for folder in folders:
        for old in folder.glob(f"{_TOKEN}*"):
            old.unlink(missing_ok=True)
        files.write_bytes(folder / f"{_TOKEN}{word}", word.encode())
    return word


def take_token(word: str, folders: list[Path]) -> None:
    """Remove it again."""
    for folder in folders:
        (folder / f"{_TOKEN}{word}").unlink(missing_ok=True)


def without_token(word: str, folders: list[Path]) -> str | None:
    """The first of these folders in which this process does not find the token, as words that follow a name."""
    for folder in folders:
        try:
            list(folder.iterdir())  # a client of NFS asks the server again when a folder is opened
            if (folder / f"{_TOKEN}{word}").read_text() == word:
                continue
        except OSError:
            pass
        return (
            f"does not see what rank 0 has just written into the folder {folder}; put the run on a file system that "
            "all nodes share"
        )
    return None


def prove_shared(run: Path) -> None:
    """UserError on all ranks, naming rank and host, unless the run folder and its checkpoints are one for all of them.

    A collective; the run folder exists on rank 0.
    """
    if dist.get_world_size() == 1:
        return
    folders = on_first_rank(lambda: places(run))
    word = on_first_rank(lambda: leave_token(folders))
    left = confirm(lambda: without_token(word, folders))
    on_first_rank(lambda: take_token(word, folders))
    if left is not None:
        raise UserError(f"run = {str(run)!r}: {left.who} {left.value}.")
