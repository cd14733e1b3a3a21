"""What a replayed hand-off decodes to: token ids by choice, and their text where a tokenizer is at hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from router.text.detokenise import IncrementalDetokeniser
from router.text.tokenizer import BadTokenizer, TextTokenizer
from shared.kv.progress import FirstTokens
from shared.kv.saved import SavedRequest
from shared.models.catalog import cached_models
from shared.models.error import ModelError
from shared.models.locate import find
from shared.models.store import default_cache_dir
from shared.wire import Finish, TokenOut


class Answer:
    """Grows by the tokens of each step. model: whose tokenizer to use; None for the one that the file names.

    Text is told as it comes if there is one choice. Raises ModelError only for a `model` that the user named.
    """

    def __init__(self, saved: SavedRequest, first: FirstTokens, model: str | None) -> None:
        work = saved.work
        self._first = first
        self._tokenizer = _tokenizer_of(model, saved)
        self._ids: dict[int, list[int]] = {}
        self._reasons: dict[int, str] = {}
        self._text: dict[int, IncrementalDetokeniser] = {}
        for choice, token_id in enumerate(first.token_ids, work.first_choice):
            self._ids[choice] = [token_id]
            if self._tokenizer is not None:
                self._text[choice] = IncrementalDetokeniser(self._tokenizer, work.token_ids)

    def first_as_json(self) -> list[dict[str, Any]]:
        """The first token of each choice, as the file has it."""
        return [
            {"choice": choice, "token_id": ids[0], "finished": finished}
            for (choice, ids), finished in zip(self._ids.items(), self._first.finished, strict=True)
        ]

    def begin(self) -> str:
        """What to show of the first token."""
        [choice, *others] = self._ids
        return "" if others else self._show(choice, self._ids[choice][0])

    def add(self, tokens: Sequence[TokenOut]) -> str:
        """Take a step's tokens; what to show of them."""
        shown = ""
        for token in tokens:
            self._ids[token.choice].append(token.token_id)
            if token.finish_reason is not None:
                self._reasons[token.choice] = token.finish_reason
            if len(self._ids) == 1:
                shown += self._show(token.choice, token.token_id)
        return shown

    def end(self, finish: Finish) -> str:
        """Ids, reasons, and how fast it was."""
        lines = ["" if len(self._ids) == 1 else "choices:"]
        for choice, ids in self._ids.items():
            lines.append(f"choice {choice} ({self._reason(choice)}): {' '.join(map(str, ids))}")
            if self._tokenizer is not None and len(self._ids) > 1:
                lines.append(f"  {self._tokenizer.decode(ids)!r}")
        rate = f", {finish.output_tokens / finish.decode_s:.1f} tokens/s" if finish.decode_s else ""
        lines.append(f"decoded {finish.output_tokens} tokens in {finish.decode_s:.3f} s{rate}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Every choice whole. text: None without a tokenizer."""
        return {
            "choices": [
                {
                    "choice": choice,
                    "token_ids": ids,
                    "finish_reason": self._reason(choice),
                    "text": None if self._tokenizer is None else self._tokenizer.decode(ids),
                }
                for choice, ids in self._ids.items()
            ]
        }

    def _reason(self, choice: int) -> str:
        position = list(self._ids).index(choice)
        return self._reasons.get(
            choice, "ended with its first token" if self._first.finished[position] else "cut"
        )

    def _show(self, choice: int, token_id: int) -> str:
        return self._text[choice].push(token_id) if choice in self._text else f"{token_id} "


def _tokenizer_of(named: str | None, saved: SavedRequest) -> TextTokenizer | None:
    """Of a model that is on this machine already. Raises ModelError if the user named it and it is not."""
    try:
        folder = (
            _folder_of(saved.model)
            if named is None
            else Path(named)
            if Path(named).is_dir()
            else _folder_of(named)
        )
        if folder is not None:
            return TextTokenizer.load(folder)
        problem = f"{named} is not here; `handoff model pull` gets it"
    except (BadTokenizer, ModelError) as exc:
        problem = str(exc)
    if named is not None:
        raise ModelError(problem)
    return None


def _folder_of(model: str) -> Path | None:
    """A folder with the tokenizer of a model; uses no network. Raises ModelError."""
    cache_dir = default_cache_dir(os.environ)
    for entry in cached_models(cache_dir):
        if entry.name == model and entry.path.is_dir():
            return entry.path
    located = find(model, cache_dir, weights=False)
    return located.path if located is not None and not located.is_gguf else None
