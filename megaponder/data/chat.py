"""How a model trained on conversations is talked to: the template of its data, kept in the run folder as chat.json."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from megaponder import files
from megaponder.data.info import DatasetMeta
from megaponder.data.template import LARGEST, Template
from megaponder.errors import UserError

NAME = "chat.json"


@dataclass(frozen=True)
class Chat:
    """A template and the token that ends an answer."""

    template: Template
    end_id: int

    def dump(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def of_datasets(described: Iterable[tuple[str, DatasetMeta | None]]) -> Chat | None:
    """Of datasets by path; None if none of them holds conversations.  UserError for different templates."""
    found: tuple[str, Chat] | None = None
    for path, meta in described:
        if meta is None or meta.conversations is None:
            continue
        said = meta.conversations
        chat = Chat(Template(said.template, said.template_text, said.bos, said.eos), said.end_id)
        if found is not None and found[1].template.text != chat.template.text:
            raise UserError(
                f"Conversations of a blend must share one template: {found[0]} has {found[1].template.name} and {path} "
                f"has {said.template}; prepare one of them again."
            )
        found = found or (path, chat)
    return None if found is None else found[1]


def write(run: Path, chat: Chat | None) -> None:
    """Write `<run>/chat.json`, if there is something to say."""
    if chat is not None:
        files.write_json(run / NAME, chat.dump())


def read(run: Path) -> Chat | None:
    """Of a run folder; None if it was not trained on conversations.  UserError for a damaged file."""
    path = run / NAME
    if not path.is_file():
        return None
    try:
        told = orjson.loads(files.read_bounded(path, 2 * LARGEST))
        return Chat(Template(**told["template"]), int(told["end_id"]))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); remove it, or give --chat-template to an export.") from None
