"""Whether prompt and answer fit into the context, and what is said where they do not."""

from __future__ import annotations

from collections.abc import Collection

from router.text.tokenizer import TextTokenizer
from shared.errors import PromptTooLong
from shared.pool_size import PoolSize


def refuse_long_text(text: str, tokenizer: TextTokenizer, max_model_len: int, param: str) -> None:
    """Raises PromptTooLong if `text` certainly has more tokens than fit; tokenising it could take seconds."""
    num_tokens = tokenizer.at_least(text, enough=max_model_len)
    if num_tokens > max_model_len:
        raise _no_room(f"at least {num_tokens}", max_model_len, param)


def room_for_answer(num_prompt: int, asked: int | None, max_model_len: int, param: str) -> int:
    """Tokens that the answer may have; a wish that does not fit is refused, not cut."""
    room = max_model_len - num_prompt
    if room < (0 if asked == 0 else 1):
        raise _no_room(num_prompt, max_model_len, param)
    if asked is not None and asked > room:
        raise PromptTooLong(
            f"{_limit(max_model_len)} However, you requested {num_prompt + asked} tokens "
            f"({num_prompt} in the {param}, {asked} in the completion). "
            f"Please reduce the length of the {param} or completion.",
            param=param,
        )
    return room


def default_length(wanted: int, num_prompt: int, num_choices: int, pools: Collection[PoolSize]) -> int:
    """Tokens for each choice of a request that names no length: `wanted`, or what the largest pool can hold.

    pools: of the workers that may get it; where none is known, nothing is cut.
    """
    return min(wanted, max((p.longest_answer(num_prompt, num_choices) for p in pools), default=wanted))


def truncated(token_ids: list[int], keep: int | None, asked: int | None, max_model_len: int) -> list[int]:
    """The last `keep` tokens; -1: as many as leave room for the answer."""
    if keep == -1:
        keep = max_model_len - (1 if asked is None else asked)
    return token_ids if keep is None or len(token_ids) <= keep else token_ids[len(token_ids) - max(keep, 1) :]


def _limit(max_model_len: int) -> str:
    """Clients search an error's text for these words."""
    return f"This model's maximum context length is {max_model_len} tokens."


def _no_room(num_prompt: int | str, max_model_len: int, param: str) -> PromptTooLong:
    return PromptTooLong(
        f"{_limit(max_model_len)} However, your {param} resulted in {num_prompt} tokens, which leaves no room for "
        f"an answer. Please reduce the length of the {param}.",
        param=param,
    )
