"""Whether all nodes share the run folder: the first rank writes a token into it, and every rank reads it back.

Otherwise ranks on two nodes would write partial checkpoints that cannot be loaded.
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
    """Write a new token into a file in each folder; tokens left by killed starts are removed."""
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
    """The first of these folders in which this process does not find the token, as words that follow a rank's name."""
    for folder in folders:
        try:
            list(folder.iterdir())  # an NFS client queries the server again when a folder is opened
            if (folder / f"{_TOKEN}{word}").read_text() == word:
                continue
        except OSError:
            pass
        return (
            f"does not see what rank 0 has just written to the folder {folder}; put the run on a file system that "
            "all nodes share"
        )
    return None


def prove_shared(run: Path) -> None:
    """UserError on all ranks, naming rank and host, unless all of them share the run folder and its checkpoints.

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
