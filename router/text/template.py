"""The checkpoint's chat template: messages in, the prompt's text out, exactly as transformers renders it.

What a message may look like is decided before (router.openai.messages); what must not become a control token is
decided by router.text.conversation. This file only finds, compiles and runs the template.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidRequest

Message = dict[str, Any]


class SpelledNumber(float):
    """A number that is written exactly as it was spelled, where a float or an int would lose digits."""

    def __new__(cls, spelling: str) -> SpelledNumber:
        """spelling: a number of JSON."""
        number = super().__new__(cls, spelling)
        number._spelling = spelling
        return number

    _spelling: str

    def __str__(self) -> str:
        return self._spelling


class BadTemplate(ValueError):
    """The checkpoint's template files cannot be read or compiled."""


class _GenerationTag(Extension):
    """Accepts {% generation %}...{% endgeneration %}, which marks text for training; here it is only text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _local_now() -> datetime:
    return datetime.now().astimezone()


class ChatTemplate:
    """Compiled once, sandboxed, thread-safe. A checkpoint without a template can still serve completions."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        now: Callable[[], datetime] = _local_now,
    ) -> None:
        """sources: template text by name; "tool_use" is taken for requests with tools, else "default".

        Raises BadTemplate.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._templates = {name: environment.from_string(text) for name, text in sources.items()}
        except TemplateError as exc:
            raise BadTemplate(f"the chat template does not compile: {exc}") from exc
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """Read chat_template.jinja, else `chat_template` of tokenizer_config.json. Raises BadTemplate."""
        config_path, jinja_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        try:
            config = json.loads(config_path.read_bytes()) if config_path.is_file() else {}
            own_file = jinja_path.read_text("utf-8") if jinja_path.is_file() else None
        except (OSError, ValueError) as exc:
            raise BadTemplate(f"{folder}: {exc}") from exc
        found = own_file if own_file is not None else config.get("chat_template")
        if isinstance(found, list):
            sources = {entry["name"]: entry["template"] for entry in found}
        else:
            sources = {"default": found} if isinstance(found, str) else {}
        return cls(sources, _special_tokens(config))

    @property
    def exists(self) -> bool:
        """False if the checkpoint brings no template."""
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text. `variables` are further names that the template may read.

        Raises InvalidRequest if there is no template, or if it refuses or trips over the messages.
        """
        names = {**self._special_tokens, **(variables or {})}
        try:
            return self._choose(tools).render(
                **names,
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateError as exc:
            raise InvalidRequest(f"the chat template refuses this: {exc.message}", param="messages") from exc
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as exc:
            raise InvalidRequest("the chat template cannot render these messages", param="messages") from exc

    def _choose(self, tools: object) -> Template:
        if not self._templates:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        return self._templates.get(name) or next(iter(self._templates.values()))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as text; the file has each as a string or as an object."""
    found = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: v.get("content") if isinstance(v, dict) else v for name, v in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: jinja2's own filter would escape <, > and & for HTML."""
    mark = secrets.token_hex(16)
    spellings: list[str] = []
    text = json.dumps(
        _without_spelled(value, mark, spellings),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    if not spellings:
        return text
    return re.sub(f'"{mark}([0-9]+)"', lambda match: spellings[int(match[1])], text)  # one pass for all


def _without_spelled(value: Any, mark: str, spellings: list[str]) -> Any:
    """`value` with `mark` and its place in `spellings` for each SpelledNumber; json has no hook for them."""
    if isinstance(value, SpelledNumber):
        spellings.append(str(value))
        return f"{mark}{len(spellings) - 1}"
    if isinstance(value, dict):
        return {key: _without_spelled(item, mark, spellings) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_spelled(item, mark, spellings) for item in value]
    return value


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
