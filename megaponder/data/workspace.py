"""The folder `<prefix>.partial`, where a dataset grows until it is complete; this makes `prepare` safe to kill.

    tokens.bin     token ids so far           lengths.bin   int32 tokens of each document so far
    mask.bin       of conversations: for each token 1 if it is learnt, else 0
    state.json     how much of both is valid, and the matching input position (written by rename)
    lock           held while a process works here

Work is done in shards: after each, the files are flushed to disk and the state advances.  A run that finds a state
truncates these files to it and continues from its position.  When everything is written, the parts get their final
names, the .idx last: without it no reader accepts a .bin as a dataset.
"""

from __future__ import annotations

import os
import shutil
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import orjson
from filelock import FileLock, Timeout

from megaponder import files
from megaponder.data.encoded import Encoded
from megaponder.data.indexed import write_index
from megaponder.data.info import DatasetMeta
from megaponder.data.readers import Position
from megaponder.errors import UserError

PARTS = (("tokens.bin", ".bin"), ("mask.bin", ".mask"), ("meta.json", ".json"), ("index.idx", ".idx"))
"""Names inside the folder and their final suffixes, in the order of publication."""


@dataclass(frozen=True)
class State:
    """How far the work has got."""

    fingerprint: str
    """Hash of inputs and options; work with a different hash is never continued."""
    position: Position = field(default_factory=Position)
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    max_id: int = -1
    crc32: int = 0
    """Of all tokens so far, as stored on disk."""
    per_file: list[tuple[int, int]] = field(default_factory=list)
    """Documents and tokens that came from each input file so far."""
    skipped: dict[str, int] = field(default_factory=dict)
    spelled: dict[str, int] = field(default_factory=dict)
    """Special tokens that are spelled out in texts so far."""
    targets: int = 0
    """Of conversations: tokens that are learnt, so far."""
    answers: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    unended: int = 0
    """`Encoded.answers`, `Encoded.ends` and `Encoded.unended` so far."""
    mask_crc32: int = 0
    whole: bool = False
    """All parts are written; only their names are missing."""


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in sorted({*one, *other})}


class Workspace:
    """One process's hold on `<prefix>.partial`."""

    def __init__(self, prefix: Path, dtype: str, masked: bool = False):
        """`masked`: each token is learnt or not, which mask.bin says."""
        self.prefix, self.dtype, self._masked = prefix, dtype, masked
        self.folder = prefix.with_name(prefix.name + ".partial")
        self._lock = FileLock(str(self.folder / "lock"))
        self._streams: dict[str, BinaryIO] = {}
        self.state = State("")

    def final(self, suffix: str) -> Path:
        """Final path of a part."""
        return self.prefix.with_name(self.prefix.name + suffix)

    def __enter__(self) -> Workspace:
        """Lock the folder; UserError if another process has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"{self.folder}: another process is preparing this dataset now.") from None
        if not (self.folder / "lock").exists():  # the other process finished between the two lines above
            raise UserError(f"{self.folder}: another process has just finished this dataset.")
        return self

    def __exit__(self, *_: object) -> None:
        """Release the folder, keeping the work in it if there is any."""
        self._close()
        if not (self.folder / "state.json").exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()

    def _close(self) -> None:
        for stream in self._streams.values():
            with files.naming(stream.name):
                stream.close()
        self._streams = {}

    def discard(self) -> None:
        """Forget all work."""
        self._close()
        (self.folder / "state.json").unlink(missing_ok=True)

    def stored(self) -> State | None:
        """State of an earlier run, or None."""
        path = self.folder / "state.json"
        if not path.is_file():
            return None
        data = orjson.loads(path.read_bytes())
        return State(**{**data, "position": Position(**data["position"])})

    def open(self, state: State) -> None:
        """Continue from `state` (a fresh one starts from scratch)."""
        self.state = state
        if state.whole:
            return
        sizes = {"tokens.bin": state.tokens * np.dtype(self.dtype).itemsize, "lengths.bin": state.documents * 4}
        if self._masked:
            sizes["mask.bin"] = state.tokens
        for name, size in sizes.items():
            path = self.folder / name
            path.touch()
            if path.stat().st_size < size:
                raise UserError(f"{path}: shorter than the last run left it; start over with --restart.")
            os.truncate(path, size)
            self._streams[name] = open(path, "ab")  # noqa: SIM115 (closed by _close)
        self.save()

    def add(self, encoded: Encoded, position: Position, skipped: dict[str, int]) -> None:
        """Append a chunk that ends at `position`; durable after the next `save`."""
        parts = {"tokens.bin": encoded.ids, "lengths.bin": encoded.lengths, "mask.bin": encoded.mask}
        for name, stream in self._streams.items():  # open() came first
            with files.naming(stream.name):
                stream.write(parts[name])
        old = self.state
        documents, tokens = len(encoded.lengths) // 4, len(encoded.ids) // np.dtype(self.dtype).itemsize
        per_file = [*old.per_file, *[(0, 0)] * (position.file + 1 - len(old.per_file))]
        per_file[-1] = (per_file[-1][0] + documents, per_file[-1][1] + tokens)
        self.state = replace(
            old,
            position=position,
            documents=old.documents + documents,
            tokens=old.tokens + tokens,
            crc32=zlib.crc32(encoded.ids, old.crc32),
            per_file=per_file,
            text_bytes=old.text_bytes + encoded.text_bytes,
            max_id=max(old.max_id, encoded.max_id),
            skipped=_sum(old.skipped, skipped),
            spelled=_sum(old.spelled, encoded.spelled),
            targets=old.targets + encoded.mask.count(1),
            answers=old.answers + encoded.answers,
            ends=_sum(old.ends, encoded.ends),
            unended=old.unended + encoded.unended,
            mask_crc32=zlib.crc32(encoded.mask, old.mask_crc32),
        )

    def save(self) -> None:
        """End a shard: everything added so far survives from here on."""
        for stream in self._streams.values():
            with files.naming(stream.name):
                stream.flush()
                os.fsync(stream.fileno())
        files.write_bytes(self.folder / "state.json", orjson.dumps(asdict(self.state)))

    def complete(self, meta: DatasetMeta) -> None:
        """Write index and description (with checksums added), and mark the work as complete."""
        self.save()
        lengths = np.memmap(self.folder / "lengths.bin", np.int32, "r", shape=(self.state.documents,))
        write_index(self.folder / "index.idx", self.dtype, lengths)
        checksums = {".bin": self.state.crc32, ".idx": files.checksum(self.folder / "index.idx")}
        if self._masked:
            checksums[".mask"] = self.state.mask_crc32
        files.write_bytes(self.folder / "meta.json", replace(meta, checksums=checksums).dump())
        self.state = replace(self.state, whole=True)
        self.save()

    def publish(self) -> None:
        """Give complete work its final names and remove the folder.  May be repeated after a crash."""
        if (self.folder / "index.idx").exists():
            for suffix in (".idx", ".mask"):  # of a dataset being overwritten: not to be paired with a new .bin
                self.final(suffix).unlink(missing_ok=True)
        for name, suffix in PARTS:
            if (self.folder / name).exists():
                os.replace(self.folder / name, self.final(suffix))
        files.sync(self.prefix.parent)
        self.discard()
