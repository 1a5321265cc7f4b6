"""The datasets of a run are the same on all ranks, from its first step to its last, and in every later start.

They are opened once and stay open, so that what is trained on is what was compared, whatever happens to their paths.
Their identities (`data.identity`) are compared on all ranks before the first step, written to `<run>/data.json` and
into every checkpoint, and compared again with the files on disk whenever a checkpoint is saved.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from megaponder import files
from megaponder.config import launcher
from megaponder.config.schema import RunConfig
from megaponder.data.check import earlier_identity, identities, open_data
from megaponder.data.checked import CheckedFile
from megaponder.data.identity import Identity, Stored, different, identify
from megaponder.data.indexed import read_index
from megaponder.data.info import read_meta
from megaponder.data.sources import Opened
from megaponder.errors import UserError
from megaponder.ranks import gather, on_first_rank

NAME = "data.json"


class SameData:
    """The opened datasets of a run.  All ranks call every method."""

    def __init__(self, cfg: RunConfig):
        """Opens and compares.  UserError on all ranks, naming the rank that lacks a dataset or has a different one."""
        self.opened: dict[str, Opened] = {}
        self.identities: dict[str, Identity] = {}
        self._accepted = {os.path.normpath(path) for path in cfg.data.accept_changed}
        problem = None
        try:
            self.opened = open_data(cfg.data)
            self.identities = identities(self.opened)
        except UserError as error:
            problem = str(error)
        self._agree(problem)
        self._known = {file.path: file.status for one in self.opened.values() for file in _files(one)}
        self._looks = launcher.place().local_rank == 0

    def stored(self) -> dict[str, Stored]:
        """The identities as plain data, by path."""
        return {path: one.stored() for path, one in self.identities.items()}

    def write(self, run: Path) -> None:
        """Write `<run>/data.json`."""
        on_first_rank(lambda: files.write_json(run / NAME, {"datasets": self.stored()}))

    def _agree(self, problem: str | None) -> None:
        mine = self.stored()
        digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
        said = gather((problem, digest))
        for one in said:
            if one.value[0] is not None:
                raise UserError(one.value[0] if len(said) == 1 else f"{one.who.capitalize()}: {one.value[0]}")
        if all(one.value[1] == said[0].value[1] for one in said):
            return
        first, *others = gather(mine)
        for other in others:
            if found := different(other.value, first.value):
                raise UserError(
                    f"The dataset {found[0]} on {other.who} differs from the one on {first.who}: {found[1]}; give all "
                    "nodes the same files."
                )

    def refuse_changed(self, then: dict[str, str | Stored], checkpoint: Path) -> list[str]:
        """UserError if a dataset has changed since `checkpoint` was saved, unless data.accept_changed names it.

        Returns warnings about those that it names.  Datasets that only one of the two has are a different matter: the
        blend has changed, which `setup.refuse_other_model` reports.
        """
        earlier = {os.path.normpath(path): identity for path, identity in then.items()}
        changed = {}
        for path, now in self.identities.items():
            before = earlier.get(os.path.normpath(path))
            if isinstance(before, str):  # of an earlier version
                same = before == earlier_identity(self.opened[path])
                what = None if same else "its lengths or checksums differ"
            else:
                what = now.difference(before) if before is not None else None
            if what:
                changed[path] = what
        refused = [path for path in changed if os.path.normpath(path) not in self._accepted]
        if refused:
            raise UserError(
                f"The dataset {refused[0]} is not the one that checkpoint {checkpoint} was trained on: "
                f"{changed[refused[0]]}; restore that one, or continue with this one by "
                f"setting data.accept_changed: [{', '.join(changed)}]."
            )
        return [
            f"Warning: the dataset {path} differs from the one used up to this checkpoint ({what}), as "
            "data.accept_changed allows; texts may be repeated or missed."
            for path, what in changed.items()
        ]

    def other_tokenizer(self, then: set[str], checkpoint: Path) -> list[str]:
        """A warning if the datasets have another tokenizer than those (fingerprints) of the weights that are loaded."""
        mine = {one.tokenizer for one in self.identities.values() if one.tokenizer}
        if not mine or not then or mine & then:
            return []
        return [
            f"Warning: the datasets were prepared with another tokenizer ({min(mine)[:12]}) than those that "
            f"{checkpoint} was trained on ({min(then)[:12]}), so that its embeddings belong to other tokens."
        ]

    def look(self) -> list[str]:
        """Sentences about datasets that were replaced, changed or deleted since they were opened.

        One process per node checks the paths, and the contents of files that seem to have changed.  One collective.
        """
        mine = self._changes() if self._looks else []
        found: dict[str, str] = {}
        for one in gather(mine):
            for sentence in one.value:
                found.setdefault(sentence, one.who)
        return [f"{sentence} (seen by {who})" for sentence, who in found.items()]

    def _changes(self) -> list[str]:
        sentences = []
        for path, one in self.opened.items():
            own = _files(one)
            try:
                status = {file.path: os.stat(file.path) for file in own}
                if all(_same_file(status[name], self._known[name]) for name in status):
                    continue
                replaced = any(status[f.path].st_ino != f.status.st_ino for f in own)
                index = read_index(path)
                what = identify(index, read_meta(index)).difference(self.identities[path].stored())
                if what is None:
                    self._known |= status
                    continue
            except FileNotFoundError as error:
                what, replaced = f"{error.filename} is gone", True
            except (OSError, UserError) as error:
                what, replaced = str(error).rstrip("."), False
            goes_on = (
                "the run continues with the files it has opened"
                if replaced
                else "data read from now on may differ from what was checked"
            )
            sentences.append(
                f"The dataset {path} was changed during this run: {what}; {goes_on}, and its checkpoints record the "
                "one it was started with"
            )
        return sentences


def _files(one: Opened) -> list[CheckedFile]:
    index = one.index
    return [index.lengths.file, index.ids.file, *([] if index.mask is None else [index.mask.file])]


def _same_file(one: os.stat_result, other: os.stat_result) -> bool:
    names = ("st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
    return all(getattr(one, name) == getattr(other, name) for name in names)
