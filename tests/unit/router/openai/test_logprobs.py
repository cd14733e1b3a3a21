"""Token entries to the two shapes of logprobs, where characters span tokens."""

from __future__ import annotations

from router.openai.logprobs import chat_logprobs, completion_logprobs
from router.text.choice import ChoiceText, TokenEntry
from router.text.stop import StopSet
from router.text.tokenizer import TextTokenizer
from shared.wire import Logprobs, TokenOut

RARE = "a\N{OLD PERSIAN SIGN A}b"  # four bytes that the tiny vocabulary spells one by one


def entries_of(tokenizer: TextTokenizer, text: str) -> list[TokenEntry]:
    """Each token chosen at -0.5, itself the best, another one second."""
    choice = ChoiceText(tokenizer, [], StopSet([]), every_entry=True)
    entries: list[TokenEntry] = []
    for token_id in tokenizer.encode(text):
        scores = Logprobs(token=-0.5, top=[(token_id, -0.5), (tokenizer.encode("z")[0], -2.0)])
        entries += choice.push(TokenOut(choice=0, token_id=token_id, logprobs=scores)).entries
    return entries


def test_the_chosen_token_is_found_under_its_name_in_tokens(tokenizer: TextTokenizer) -> None:
    """Clients look it up there to see whether it was the best; parts of characters were spelled in two ways."""
    entries = entries_of(tokenizer, RARE)
    lists = completion_logprobs(entries, tokenizer)

    assert RARE == "".join(lists["tokens"])
    assert "" in lists["tokens"]
    found = [best[token] for token, best in zip(lists["tokens"], lists["top_logprobs"], strict=True)]
    assert lists["token_logprobs"] == found
    assert all({2} == {len(best)} for best in lists["top_logprobs"])
    assert lists["tokens"] == [max(best, key=lambda text: best[text]) for best in lists["top_logprobs"]]


def test_a_look_alike_does_not_hide_the_chosen_token(tokenizer: TextTokenizer) -> None:
    """Two ids with one text share a key, and the chosen one's number is the one that stands there."""
    z = tokenizer.encode("z")[0]
    entry = TokenEntry(tokenizer.encode("y")[0], "z", 0, -3.0, [(z, -0.1)])

    assert [{"z": -3.0}] == completion_logprobs([entry], tokenizer)["top_logprobs"]


def test_bytes_of_a_character_in_parts_join_to_it(tokenizer: TextTokenizer) -> None:
    """On chat each part has bytes of its own, in the chosen token and in the best ones alike."""
    content = chat_logprobs(entries_of(tokenizer, RARE), tokenizer)["content"]

    assert RARE.encode() == bytes(byte for entry in content for byte in entry["bytes"])
    assert [(e["token"], e["bytes"]) for e in content] == [
        (e["top_logprobs"][0]["token"], e["top_logprobs"][0]["bytes"]) for e in content
    ]
