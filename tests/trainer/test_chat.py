"""Conversations: only what the assistant says is trained, whatever the template, or the row is refused."""

import json

import pytest

from ckptool import DamagedError, UnsupportedError
from tests.trainer.tiny import make_tokenizer
from trainer.corpus import open_corpus
from trainer.packing import Documents
from trainer.sources.spec import SourceSpec
from trainer.units import IGNORED

PLAIN = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<end>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<end>{% endif %}\n{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}<{{ m['role'] }}>{% if loop.last %}(thinks){% endif %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ciao"},
]


@pytest.fixture
def open_chat(tmp_path):
    def opened(rows, template=PLAIN):
        tokenizer = make_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "hf")
        (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = SourceSpec("chat", (str(tmp_path / "chat.jsonl"),), "chat")
        return open_corpus(spec, tmp_path / "hf", tmp_path / "root", print)

    return opened


def text_and_trained(corpus):
    """The whole text, and the trained stretches of it joined by |."""
    decode = make_tokenizer().decode
    tokens, mask = corpus.tokens().read(0, corpus.num_tokens), corpus.trained().read(0, corpus.num_tokens)
    trained = "".join(decode([t]) if m else "\0" for t, m in zip(tokens.tolist(), mask.tolist(), strict=True))
    return decode(tokens.tolist()), "|".join(part for part in trained.split("\0") if part)


def test_the_assistants_tokens_and_their_end_marks_are_trained(open_chat):
    text, trained = text_and_trained(open_chat([{"messages": TURNS}]))
    assert text == "<user>hi<end>\n<assistant>hello<end>\n<user>bye<end>\n<assistant>ciao<end>\n"
    assert trained == "hello<end>\n|ciao<end>\n"


def test_a_template_that_marks_its_generations_is_believed(open_chat):
    assert text_and_trained(open_chat([{"messages": TURNS}], MARKED))[1] == "hello<end>|ciao<end>"


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"prompt": "hi", "completion": "hello"},
        {"prompt": TURNS[:1], "completion": TURNS[1:2]},
        {"messages": [*TURNS[:1], {**TURNS[1], "name": None}]},
    ],
)
def test_other_layouts_of_a_row_are_the_same_conversation(open_chat, row):
    assert text_and_trained(open_chat([row])) == ("<user>hi<end>\n<assistant>hello<end>\n", "hello<end>\n")


def test_labels_of_what_others_say_are_ignored(open_chat):
    units = Documents(open_chat([{"messages": TURNS[:2]}]), seq_len=64)
    row = units.row(0)
    kept = [label for label in row.labels.tolist() if label != IGNORED]
    assert make_tokenizer().decode(kept) == "hello<end>\n"
    assert make_tokenizer().decode(row.inputs.tolist()) == "<user>hi<end>\n<assistant>hello<end>"


def test_a_conversation_without_an_answer_is_left_out(open_chat):
    corpus = open_chat([{"messages": TURNS[:1]}, {"messages": TURNS[:2]}])
    assert corpus.num_documents == 1


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_there_are_none(open_chat):
    with pytest.raises(UnsupportedError, match="changes earlier messages"):
        open_chat([{"messages": TURNS}], FORGETFUL)
    assert text_and_trained(open_chat([{"messages": TURNS[:2]}], FORGETFUL.replace("loop.last", "false")))[1] == "hello"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "hi"}, "has no messages, conversations, or prompt and completion, only text"),
        ({"messages": []}, "row 0: not a conversation"),
        ({"messages": [{"content": "hi"}]}, "row 0: not a conversation"),
        ({"messages": [{"role": "assistant", "content": None}]}, "a message has no content"),
        ({"conversations": [{"from": "robot", "value": "hi"}]}, "row 0: not a conversation"),
    ],
)
def test_a_row_that_is_no_conversation_is_named(open_chat, row, message):
    with pytest.raises(DamagedError, match=message):
        open_chat([row])


def test_a_template_that_raises_is_named(open_chat):
    with pytest.raises(DamagedError, match="row 0: the chat template refuses it: only users"):
        open_chat([{"messages": TURNS}], "{{ raise_exception('only users') }}")


def test_a_tokenizer_without_a_template_is_refused(open_chat):
    with pytest.raises(UnsupportedError, match="no chat template"):
        open_chat([{"messages": TURNS}], None)
