"""A conversation to token ids, such that only the template can write control tokens.

Rendering makes one text of the template's words and the caller's, and a tokenizer cannot tell whose
"<|im_end|>" it reads. So each control string in what the caller wrote is broken, before rendering, by a random
number after its first character. After rendering, an unbroken control string is the template's own and becomes
its token; between them the number is taken out again and the text is tokenised as ordinary text. A number made of
digits passes through every filter that templates use (trim, tojson in any mode, upper, split); which digits, the
caller cannot know. Conversations without control strings take the plain path, which is transformers' own.

Tags that are single tokens but ordinary text in answers (<tool_call>, <think>) are broken too in what users and
tools say and in names, arguments and schemas, but not in system and assistant turns: those belong to the
application, which writes such tags on purpose when it keeps a model's own words.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from router.text.template import ChatTemplate, Message
from router.text.tokenizer import TextTokenizer, any_text
from shared.errors import InvalidRequest

_NONCE_DIGITS = 20
_TRUSTED_ROLES = frozenset({"system", "assistant"})
_SPOKEN = frozenset({"content", "reasoning_content"})


class ConversationEncoder:
    """Messages to prompt ids. Thread-safe; takes time in proportion to the text."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate) -> None:
        tags = {text for text in tokenizer.control_ids if text.startswith("<") and text.endswith(">")}
        self._tokenizer = tokenizer
        self._template = template
        self._special = _any_of(tokenizer.special_texts)
        self._special_or_tag = _any_of(tokenizer.special_texts | tags)
        self._control = tokenizer.control_pattern()

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        check: Callable[[str], None] | None = None,
        add_bos: bool = False,
    ) -> list[int]:
        """Prompt ids of a conversation.

        continue_final_message: leave the last message open, with its trailing spaces, to be written on.
        check: gets the whole prompt as text before it is tokenised, and may raise.
        add_bos: a BOS token comes first, whatever the template writes.
        Raises InvalidRequest if the template cannot render it.
        """
        nonce = str(secrets.randbelow(9 * 10**_NONCE_DIGITS) + 10**_NONCE_DIGITS)
        safe_messages = [self._protect_message(message, nonce) for message in messages]
        safe_tools = _protect(tools, self._special_or_tag, nonce) if tools else None
        safe_variables = _protect(variables, self._special_or_tag, nonce) if variables else None
        changed = (safe_messages, safe_tools, safe_variables) != (
            list(messages),
            tools or None,
            variables or None,
        )
        end_mark = nonce[::-1] + nonce
        if continue_final_message:
            last = safe_messages[-1]
            safe_messages[-1] = {**last, "content": last["content"] + end_mark}
        text = self._template.render(
            safe_messages,
            tools=safe_tools,
            add_generation_prompt=add_generation_prompt,
            variables=safe_variables,
        )
        if continue_final_message:
            text, mark, _ = text.rpartition(end_mark)
            if not mark:
                raise InvalidRequest("the chat template drops the message to continue", param="messages")
        if check is not None:
            check(text.replace(nonce, "") if changed else text)
        ids = self._encode_broken(text, nonce) if changed else self._tokenizer.encode(text)
        return [*self._tokenizer.bos_ids, *ids] if add_bos else ids

    def _protect_message(self, message: Message, nonce: str) -> Message:
        """Only the content of trusted roles may hold tags; everything else is broken wherever it can be."""
        trusted = message.get("role") in _TRUSTED_ROLES
        own = self._special if trusted else self._special_or_tag
        return {
            key: _protect(value, own if key in _SPOKEN else self._special_or_tag, nonce)
            for key, value in message.items()
        }

    def _encode_broken(self, text: str, nonce: str) -> list[int]:
        ids: list[int] = []
        begin = 0
        for match in self._control.finditer(text):
            ids += self._encode_between(text[begin : match.start()], nonce)
            ids.append(self._tokenizer.control_ids[match.group()])
            begin = match.end()
        return ids + self._encode_between(text[begin:], nonce)

    def _encode_between(self, text: str, nonce: str) -> list[int]:
        if not text:
            return []
        return self._tokenizer.encode(text.replace(nonce, ""), allow_special=False)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Any of the texts that can be broken, which a single character cannot."""
    return any_text(text for text in texts if len(text) > 1)


def _protect(value: Any, control: re.Pattern[str], nonce: str) -> Any:
    """`value` with every control string in it, dict keys included, broken by `nonce`."""
    if isinstance(value, str):
        while control.search(value):  # again, for strings that overlap
            value = control.sub(lambda match: match.group()[0] + nonce + match.group()[1:], value)
        return value
    if isinstance(value, Mapping):
        return {_protect(key, control, nonce): _protect(item, control, nonce) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_protect(item, control, nonce) for item in value]
    return value
