"""Conversations through the tokenizer's chat template, with the assistant's tokens marked as the trained ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ckptool import DamagedError, UnsupportedError
from trainer.sources.documents import Document, Table

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}
_LAYOUTS = "messages, conversations, or prompt and completion"


def check_chat(tokenizer: Any, table: Table) -> None:
    """Raises UnsupportedError without a chat template, DamagedError when the columns hold no conversations."""
    if not tokenizer.chat_template:
        raise UnsupportedError("the tokenizer has no chat template", hint="use one of an instruction-tuned model")
    if not tokenizer.is_fast:
        raise UnsupportedError("the tokenizer can't say which characters a token stands for", hint="use a fast one")
    columns = set(table.rows.column_names)
    if not ({"messages"} <= columns or {"conversations"} <= columns or {"prompt", "completion"} <= columns):
        raise DamagedError(f"{table.where} has no {_LAYOUTS}, only {', '.join(sorted(columns))}")


def chat_documents(tokenizer: Any, table: Table, start: int, stop: int) -> Iterator[Document]:
    """The conversations of rows `start` to `stop`. A row without an assistant's message is left out."""
    for number in range(start, stop):
        where = f"{table.where}, row {number}"
        messages = _messages(table.rows[number], where)
        if any(message["role"] == "assistant" for message in messages):
            yield _encode(tokenizer, messages, where)


def _messages(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """A row as role and content; keys that `datasets` filled up with None are dropped."""
    if row.get("messages") is not None:
        messages = row["messages"]
    elif row.get("conversations") is not None:
        messages = [
            {"role": _SHAREGPT_ROLES.get(m.get("from")), "content": m.get("value")} for m in row["conversations"]
        ]
    elif isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):
        messages = [*row["prompt"], *row["completion"]]
    else:
        messages = [
            {"role": "user", "content": row.get("prompt")},
            {"role": "assistant", "content": row.get("completion")},
        ]
    if not messages or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise DamagedError(f"{where}: not a conversation; a row should hold {_LAYOUTS}")
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    if not all("content" in m or "tool_calls" in m for m in messages):
        raise DamagedError(f"{where}: a message has no content")
    return messages


def _encode(tokenizer: Any, messages: list[dict[str, Any]], where: str) -> Document:
    if re.search(r"\{%-?\s*generation\b", tokenizer.chat_template):
        encoded = _render(
            tokenizer, messages, where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return Document(encoded["input_ids"], encoded["assistant_masks"])
    text = _render(tokenizer, messages, where, tokenize=False)
    spans = [_span(tokenizer, messages, n, text, where) for n, m in enumerate(messages) if m["role"] == "assistant"]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    trained = [
        int(any(begin < span_end and end > span_begin for span_begin, span_end in spans))
        for begin, end in encoded["offset_mapping"]
    ]
    return Document(encoded["input_ids"], trained)


def _span(tokenizer: Any, messages: list[dict[str, Any]], number: int, text: str, where: str) -> tuple[int, int]:
    """Where in `text` the template put what the assistant says in message `number`, end marks included.

    That is what stands between the generation prompt and the end of the conversation so far. A template that renders
    earlier messages differently once there are later ones gives no such place, and is refused.
    """
    before = _render(tokenizer, messages[:number], where, tokenize=False, add_generation_prompt=True) if number else ""
    after = _render(tokenizer, messages[: number + 1], where, tokenize=False)
    if not (text.startswith(after) and after.startswith(before)):
        raise UnsupportedError(
            f"{where}: the chat template changes earlier messages, so the assistant's tokens can't be told",
            hint="put {% generation %} around them in the template, or give conversations of one answer each",
        )
    return len(before), len(after)


def _render(tokenizer: Any, messages: list[dict[str, Any]], where: str, **options: Any) -> Any:
    import jinja2

    try:
        return tokenizer.apply_chat_template(messages, **options)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise DamagedError(f"{where}: the chat template refuses it: {error}") from error
