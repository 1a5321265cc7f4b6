"""Chat templates: from a conversation to a text, and to the parts of it that the assistant wrote.

Jinja templates as `transformers` reads them, by its own renderer.  A template that marks answers with
`{% generation %}` says itself which parts are learnt.  In others, an answer is what its message adds to the text of
the messages before it and the header of an answer (`add_generation_prompt`): what a model writes when it is asked.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaponder import files
from megaponder.data.conversations import ANSWERS, BadRecordError, Conversation
from megaponder.data.tokenizer import Tokenizer
from megaponder.errors import UserError, first_line

LARGEST = 1 << 20
"""Maximum bytes of a chat template."""
OF_TOKENIZER = "tokenizer"
"""Stands for the template of the tokenizer's own folder."""
ALPACA = """\
{%- set ns = namespace(first=true) -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{ m.content + '\\n\\n' }}{%- set ns.first = false -%}
{%- elif m.role == 'user' -%}
{%- if ns.first -%}
{%- if m.input -%}
{{ 'Below is an instruction that describes a task, paired with an input that provides further context. Write a \
response that appropriately completes the request.\\n\\n' }}
{%- else -%}
{{ 'Below is an instruction that describes a task. Write a response that appropriately completes the request.\\n\\n' }}
{%- endif -%}
{%- set ns.first = false -%}
{%- endif -%}
{{ '### Instruction:\\n' + (m.instruction if m.instruction is defined else m.content) + '\\n\\n' }}
{%- if m.input -%}{{ '### Input:\\n' + m.input + '\\n\\n' }}{%- endif -%}
{%- elif m.role == 'assistant' -%}{{ '### Response:\\n' + m.content + eos_token }}
{%- else -%}{{ raise_exception('the alpaca template has no role ' + m.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '### Response:\\n' }}{%- endif -%}
"""
CHATML = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
BUILT_IN = {"alpaca": ALPACA, "chatml": CHATML}
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CALLS = ("tool_calls", "function_call")
"""Fields of a message that calls a tool."""
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Template:
    """A chat template and the special tokens that it may write."""

    name: str
    """alpaca, chatml, tokenizer, or a file."""
    text: str
    bos: str
    eos: str

    def prompt(self, messages: list[dict[str, Any]]) -> str:
        """The text after which an answer follows.  UserError if the template cannot render it."""
        try:
            return self._render(Conversation(messages), len(messages), asks=True)[0]
        except BadRecordError as error:
            raise UserError(f"template {self.name}: {error}.") from None

    def render(self, talk: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and [begin, end) of each answer in it, in characters.

        Raises BadRecordError where the template refuses the conversation, leaves out a message, or does not show which
        parts are answers.
        """
        self._refuse_dropped(talk)
        text, marked = self._render(talk, len(talk.messages))
        for message in talk.messages:
            parts = [message[name] for name in ("instruction", "input") if name in message]
            said: list[str] = parts or [message["content"]]
            if message["role"] != ANSWERS and not all(part.strip() in text for part in said):
                raise BadRecordError("template", f"template {self.name} leaves out what the {message['role']} says")
        answers = [i for i, message in enumerate(talk.messages) if message["role"] == ANSWERS]
        if _MARKED.search(self.text):
            if len(marked) != len(answers):
                rule = f"template {self.name} marks {len(marked)} of {len(answers)} answers"
                raise BadRecordError("template", rule)
            return text, marked
        return text, [self._added(talk, number, text) for number in answers]

    def _refuse_dropped(self, talk: Conversation) -> None:
        """BadRecordError for tools and calls of them, which the template cannot write since it does not name them."""
        there = {name for message in talk.messages for name in CALLS if message.get(name)}
        there |= {"tools"} if talk.tools else set()
        for name in sorted(there):
            if name not in self.text:
                rule = f"template {self.name} does not write the field {name}, so it would be dropped"
                fix = f"use --template {OF_TOKENIZER} with a tokenizer whose chat template does, or remove the field"
                raise BadRecordError("template", f"{rule}; {fix}")

    def _added(self, talk: Conversation, number: int, text: str) -> tuple[int, int]:
        """Where message `number` stands in the text, without its header."""
        before, after = self._render(talk, number, asks=True)[0], self._render(talk, number + 1)[0]
        if not (text.startswith(before) and text.startswith(after) and len(before) < len(after)):
            raise BadRecordError(
                "template",
                f"template {self.name} changes earlier messages once later ones follow, so answers cannot be told; "
                "mark them in it with {% generation %}",
            )
        return len(before), len(after)

    def _render(self, talk: Conversation, count: int, asks: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """The text of the first `count` messages."""
        compiled, marks = _compiled(self.text)
        given: dict[str, Any] = dict(messages=talk.messages[:count], tools=talk.tools or None, documents=None)
        given |= dict(add_generation_prompt=asks, bos_token=self.bos, eos_token=self.eos)
        try:
            if _MARKED.search(self.text):
                text, found = marks(compiled_template=compiled, **given)
                return text, [(int(begin), int(end)) for begin, end in found]
            return compiled.render(**given), []
        except Exception as error:  # whatever a template does
            raise BadRecordError("template", f"template {self.name}: {first_line(error)}") from None


@functools.lru_cache(maxsize=4)
def _compiled(text: str) -> tuple[Any, Any]:
    """The template as transformers compiles it, and its function that also tells where answers are."""
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template, _render_with_assistant_indices
    except ImportError as error:
        raise UserError(
            f"Chat templates need transformers and jinja2 ({error}); install them with "
            'pip install "megaponder[export]".'
        ) from None
    return _compile_jinja_template(text), _render_with_assistant_indices


def find_template(name: str, tokenizer: Tokenizer) -> Template:
    """A built-in template, that of the tokenizer, or a Jinja file.

    Raises UserError for a file that is missing or not Jinja, for a tokenizer without a template, and for chatml with a
    tokenizer that lacks its tokens.
    """
    lacking = [token for token in CHATML_TOKENS if token not in tokenizer.special_tokens]
    if name == "chatml" and lacking:
        raise UserError(
            f"--template chatml: {' and '.join(lacking)} must be special tokens, and the tokenizer {tokenizer.name} "
            "has no such ones; use --template alpaca, which needs none."
        )
    if name in BUILT_IN:
        text = BUILT_IN[name]
    elif name == OF_TOKENIZER:
        found = template_of(tokenizer)
        if isinstance(found, list):  # several, by name
            found = next((one["template"] for one in found if one.get("name") == "default"), None)
        if not isinstance(found, str):
            raise UserError(
                f"{tokenizer.name}: this tokenizer has no chat template; use --template {' or '.join(BUILT_IN)}, or a "
                "Jinja file."
            )
        text = found
    elif not Path(name).is_file():
        raise UserError(
            f"--template {name}: there is no such file; use one of {', '.join((*BUILT_IN, OF_TOKENIZER))}, or a Jinja "
            "file."
        )
    else:
        text = read_template(Path(name))
    return of_text(name, text, tokenizer)


def of_text(name: str, text: str, tokenizer: Tokenizer) -> Template:
    """The template with the tokens that the tokenizer begins and ends texts with."""
    by_id = {i: token for token, i in tokenizer.special_tokens.items()}
    eos = by_id.get(tokenizer.eod_id, "") if tokenizer.eod_id is not None else ""
    bos = _setting(tokenizer, "bos_token")
    bos = bos.get("content") if isinstance(bos, dict) else bos
    return Template(name, text, bos if isinstance(bos, str) else eos, eos)


def _folder(tokenizer: Tokenizer) -> Path | None:
    folder = Path(tokenizer.name)
    folder = folder if folder.is_dir() else folder.parent
    return None if tokenizer.kind == "bytes" or not folder.is_dir() else folder


def _setting(tokenizer: Tokenizer, name: str) -> Any:
    """A field of the tokenizer_config.json beside a tokenizer."""
    folder = _folder(tokenizer)
    if folder is None or not (folder / "tokenizer_config.json").is_file():
        return None
    path = folder / "tokenizer_config.json"
    try:
        return json.loads(files.read_bounded(path, LARGEST << 4)).get(name)
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}).") from error


def template_of(tokenizer: Tokenizer) -> Any:
    """The text of the template in the tokenizer's folder, or several with their names; None if there is none."""
    folder = _folder(tokenizer)
    if folder is not None and (folder / "chat_template.jinja").is_file():
        return read_template(folder / "chat_template.jinja")
    return _setting(tokenizer, "chat_template")


def read_template(path: Path) -> str:
    """UserError for a file that is missing or that Jinja does not understand."""
    try:
        text = files.read_bounded(path, LARGEST).decode()
        _compiled(text)
    except UserError:
        raise
    except Exception as error:  # of the file, or of Jinja
        raise UserError(f"{path} cannot be read as a chat template: {first_line(error)}.") from None
    return text
