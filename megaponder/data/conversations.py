"""Records of instruction data as conversations: Alpaca's fields, lists of messages, and ShareGPT's names for both.

{"instruction": ..., "input": ..., "output": ...}                      also "system"; input may be absent or empty
{"messages": [{"role": "user", "content": ...}, ...]}                  also "tools"
{"conversations": [{"from": "human", "value": ...}, ...]}              also "system"
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_NAMES = {
    "human": "user", "prompter": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant",
    "chatgpt": "assistant", "function": "tool", "observation": "tool",
}  # fmt: skip
"""What ShareGPT and others call the roles."""
ANSWERS = "assistant"
"""The role whose messages are learnt."""
LISTS = ("messages", "conversations", "conversation")
"""Fields that hold a list of messages."""

Message = dict[str, Any]


class BadRecordError(ValueError):
    """A record that is no conversation; `reason` is one of `documents.REASONS`."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Conversation:
    """Messages in order; each has a role of `ROLES` and a text as its content."""

    messages: list[Message]
    tools: list[Any] = field(default_factory=list)
    """Descriptions of tools, for templates that show them."""

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of all messages."""
        return sum(len(message["content"].encode(errors="replace")) for message in self.messages)


def conversation(record: Any, name: str | None = None) -> Conversation:
    """The conversation of a record; `name`: the field with the messages, if it has a name of its own.

    Raises BadRecordError for a record of another form, an unknown role, and one in which nobody answers.
    """
    if not isinstance(record, dict):
        raise BadRecordError("bad_field", "the record is not an object")
    key = name if name is not None else next((key for key in LISTS if key in record), None)
    if key is not None and key in record:
        messages = listed(record[key], key)
        if isinstance(record.get("system"), str) and record["system"] and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": record["system"]})
    elif "instruction" in record and "output" in record:
        messages = _alpaca(record)
    else:
        wanted = name or f"{', '.join(LISTS[:2])}, or instruction and output"
        keys = ", ".join(sorted(map(str, record))[:10]) or "none"
        raise BadRecordError("bad_field", f"it has no field {wanted} (fields: {keys})")
    if not any(m["role"] == ANSWERS and m["content"].strip() for m in messages):
        raise BadRecordError("no_answer", "no message of the assistant has any text, so there is nothing to learn")
    return Conversation(messages, _tools(record.get("tools")))


def _tools(found: Any) -> list[Any]:
    """A list, or one as JSON; BadRecordError for anything else that says something."""
    if isinstance(found, str) and found.strip():
        try:
            found = json.loads(found)
        except ValueError:
            raise BadRecordError("bad_field", "field 'tools' is neither a list nor one as JSON") from None
    if found and not isinstance(found, list):
        raise BadRecordError("bad_field", "field 'tools' is neither a list nor one as JSON")
    return found if isinstance(found, list) else []


def _alpaca(record: dict[str, Any]) -> list[Message]:
    """Instruction and input are one message; its parts stand beside it for templates that know them."""
    parts = {key: record.get(key) or "" for key in ("system", "instruction", "input", "output")}
    for key, value in parts.items():
        if not isinstance(value, str):
            raise BadRecordError("bad_field", f"field {key!r} is not a string")
    asked = "\n\n".join(part for part in (parts["instruction"], parts["input"]) if part)
    before = [{"role": "system", "content": parts["system"]}] if parts["system"] else []
    user = {"role": "user", "content": asked, "instruction": parts["instruction"], "input": parts["input"]}
    return [*before, user, {"role": ANSWERS, "content": parts["output"]}]


def listed(found: Any, key: str) -> list[Message]:
    """The messages of a list, whoever speaks last.  BadRecordError for what is no message."""
    if not isinstance(found, list) or not found:
        raise BadRecordError("bad_field", f"field {key!r} is not a list of messages")
    return [_message(one, f"{key}[{at}]") for at, one in enumerate(found)]


def _message(one: Any, where: str) -> Message:
    if not isinstance(one, dict):
        raise BadRecordError("bad_field", f"{where} is not an object")
    role = one.get("role", one.get("from"))
    known = OTHER_NAMES.get(role, role) if isinstance(role, str) else None
    if known not in ROLES:
        legal = ", ".join((*ROLES, *OTHER_NAMES))
        raise BadRecordError("unknown_role", f"{where} has the role {role!r}; known: {legal}")
    content = one.get("content", one.get("value"))
    if content is None and one.get("tool_calls"):
        content = ""  # a call of a tool has no words
    if isinstance(content, list):  # parts, of which texts can be learnt
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) else None
    if not isinstance(content, str):
        raise BadRecordError("bad_field", f"{where} has no text as its content")
    rest = {k: v for k, v in one.items() if k not in ("role", "from", "content", "value")}
    return {"role": known, "content": content, **rest}
