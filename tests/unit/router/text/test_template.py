"""The chat template, rendered and tokenised, against transformers as the oracle; and what it refuses."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from router.text.conversation import ConversationEncoder
from router.text.template import BadTemplate, ChatTemplate
from router.text.tokenizer import TextTokenizer
from shared.errors import InvalidRequest

USER = {"role": "user", "content": "What is the capital of France?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a <city> & more, 天气",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2], "x": 1.5, "y": None}},
}


def turn(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    """One message."""
    return {"role": role, "content": content, **more}


CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    ([USER], None),
    ([turn("user", "")], None),
    ([turn("user", " spaces around \n ")], None),
    ([turn("user", "你好，世界 😀 नमस्ते")], None),
    ([turn("user", "<b>html & 'quotes' \"double\"</b>")], None),
    ([turn("user", "def f():\n\treturn {{ x }} {% if %}")], None),
    ([turn("system", "Be brief."), USER], None),
    ([turn("system", ""), USER], None),
    ([turn("system", "One."), turn("system", "Two."), USER], None),
    ([USER, turn("system", "Later."), turn("user", "Go on")], None),
    ([USER, turn("assistant", "Paris."), turn("user", "And Italy?")], None),
    ([USER, turn("assistant", "Paris.")], None),
    ([turn("system", "S"), USER, turn("assistant", "  Paris \n"), turn("user", "Why?")], None),
    ([USER], [TOOL]),
    ([turn("system", "Use tools."), USER], [TOOL, TOOL]),
    ([USER, turn("assistant", None, tool_calls=[CALL])], [TOOL]),
    ([USER, turn("assistant", "Let me look.", tool_calls=[CALL, CALL])], [TOOL]),
    (
        [USER, turn("assistant", "", tool_calls=[CALL]), turn("tool", '{"t": 20}', tool_call_id="call_1")],
        [TOOL],
    ),
    (
        [
            USER,
            turn("assistant", "", tool_calls=[CALL, CALL]),
            turn("tool", "20 °C"),
            turn("tool", "21 °C"),
            turn("assistant", "Twenty."),
            turn("user", "Thanks"),
        ],
        [TOOL],
    ),
    ([turn("user", "long " * 500)], None),
    ([turn("system", "Answer within <tool_call></tool_call> tags."), USER], None),
    ([USER, turn("assistant", '<tool_call>\n{"name": "f"}\n</tool_call>'), USER], None),
]


class Reference:
    """What transformers makes of a conversation."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def ids(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Prompt ids."""
        ids: list[int] = self._tokenizer.apply_chat_template(messages, return_dict=False, **options)
        return ids


@pytest.fixture(scope="session")
def encoder(tokenizer: TextTokenizer, template: ChatTemplate) -> ConversationEncoder:
    """The tiny checkpoint's conversation encoder."""
    return ConversationEncoder(tokenizer, template)


@pytest.mark.parametrize("generation", [True, False])
def test_ids_equal_transformers(tiny_folder: Path, encoder: ConversationEncoder, generation: bool) -> None:
    """Ordinary conversations have exactly the ids of apply_chat_template."""
    reference = Reference(tiny_folder)
    for messages, tools in CONVERSATIONS:
        expected = reference.ids(messages, tools=tools, add_generation_prompt=generation)
        assert expected == encoder.encode(messages, tools=tools, add_generation_prompt=generation), messages


@pytest.mark.real
@pytest.mark.timeout(900)
def test_real_ids_equal_transformers(real_folder: Path) -> None:
    """The same with the real tokenizer and the real Qwen2.5 template."""
    reference = Reference(real_folder)
    real = ConversationEncoder(TextTokenizer.load(real_folder), ChatTemplate.load(real_folder))
    for messages, tools in CONVERSATIONS:
        expected = reference.ids(messages, tools=tools, add_generation_prompt=True)
        assert expected == real.encode(messages, tools=tools), messages


def test_a_continued_message_stays_open(tiny_folder: Path, encoder: ConversationEncoder) -> None:
    """The last message is neither closed nor followed by a new turn, as in transformers."""
    messages = [USER, turn("assistant", '{"a":')]
    expected = Reference(tiny_folder).ids(messages, continue_final_message=True)

    assert expected == encoder.encode(messages, add_generation_prompt=False, continue_final_message=True)


def test_a_continued_message_keeps_its_trailing_spaces(
    tokenizer: TextTokenizer, encoder: ConversationEncoder
) -> None:
    """Trailing spaces belong to the text to continue."""
    ids = encoder.encode(
        [USER, turn("assistant", "Well,  ")], add_generation_prompt=False, continue_final_message=True
    )

    assert tokenizer.decode(ids).endswith("assistant\nWell,  ")


def test_special_tokens_are_named_to_the_template() -> None:
    """bos_token and its kin are variables, extra variables too, and absent ones are empty."""
    template = ChatTemplate({"default": "{{ bos_token }}|{{ eos_token }}|{{ mood }}"}, {"eos_token": "</s>"})

    assert "|</s>|calm" == template.render([USER], variables={"mood": "calm"})


def test_what_transformers_templates_use_works() -> None:
    """Loop controls, generation tags, tojson options, the clock and white space control."""
    text = (
        "{% for m in messages %}\n{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {% generation %}{{ m.content }}{% endgeneration %}\n"
        "{% endfor %}\n{{ strftime_now('%Y') }} {{ {'b': '<é>'} | tojson(indent=1) }}"
    )
    template = ChatTemplate({"default": text}, now=lambda: datetime(2031, 5, 6, tzinfo=UTC))

    assert 'hi2031 {\n "b": "<é>"\n}' == template.render([turn("user", "hi"), turn("user", "no")])


def test_named_templates_are_chosen_by_need(tmp_path: Path) -> None:
    """A list of named templates: the one for tools where there are tools, else the default."""
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path)

    assert "D" == template.render([USER])
    assert "T" == template.render([USER], tools=[TOOL])


def test_its_own_file_comes_first(tmp_path: Path) -> None:
    """chat_template.jinja is taken before tokenizer_config.json."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")

    assert "file " == ChatTemplate.load(tmp_path).render([USER])


def test_no_template_is_the_clients_error(tmp_path: Path) -> None:
    """A model without a template refuses conversations with a 400."""
    template = ChatTemplate.load(tmp_path)

    assert not template.exists
    with pytest.raises(InvalidRequest, match="no chat template"):
        template.render([USER])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[3].content }}", "refuses"),
        ("{{ 1 + messages[0].content }}", "cannot render"),
        ("{{ messages[0].__class__.__mro__ }}", "refuses"),
    ],
)
def test_a_template_that_trips_is_a_400(text: str, message: str) -> None:
    """Whatever a template raises becomes one clear client error."""
    with pytest.raises(InvalidRequest, match=message):
        ChatTemplate({"default": text}).render([USER])


def test_a_broken_template_stops_the_start(tmp_path: Path) -> None:
    """A template that does not compile, or files that cannot be read, are told at load."""
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(BadTemplate, match="compile"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(BadTemplate):
        ChatTemplate.load(tmp_path)
