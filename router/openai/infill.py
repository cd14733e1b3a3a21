"""`suffix`: a prompt in the fill-in-the-middle form that code models are trained on.

Source: the Qwen2.5-Coder technical report, file-level FIM. Where the tokenizer has its three tokens they are used;
whether the checkpoint was trained on them cannot be seen from here.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.text.tokenizer import TextTokenizer
from shared.errors import InvalidRequest

PREFIX, SUFFIX, MIDDLE = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"


def fill_in_the_middle(tokenizer: TextTokenizer, before: Sequence[int], after: str) -> list[int]:
    """Ids that ask for what stands between `before` and `after`. Raises InvalidRequest without such tokens."""
    ids = [tokenizer.control_ids.get(text) for text in (PREFIX, SUFFIX, MIDDLE)]
    prefix, suffix, middle = ids
    if prefix is None or suffix is None or middle is None:
        raise InvalidRequest(
            f"suffix is not supported: this model's tokenizer has no {PREFIX} token", param="suffix"
        )
    return [prefix, *before, suffix, *tokenizer.encode(after), middle]
