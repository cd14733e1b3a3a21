"""A small byte-level BPE of the Qwen2 kind, trained in milliseconds on the text below.

In: a folder. Out: tokenizer.json and tokenizer_config.json (ChatML template) in it. Knows nothing of weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from tokenizers.trainers import BpeTrainer

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
PLAIN_ADDED = ("<tool_call>", "</tool_call>")  # single tokens that are text all the same, as in Qwen2.5

_BPE_SIZE = 640
_WORD = (  # how Qwen2 cuts text before BPE: contractions, words, single digits, punctuation, white space
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEXT = """\
The capital of France is Paris, and the capital of Italy is Rome. What is the capital of Spain? Madrid.
A worker that computes the prompt hands keys and values to a worker that writes the answer, token by token.
You are a helpful assistant. A user asks, the assistant answers; system, user and tool take turns.
def add(a, b):\n    return a + b\n\nprint(add(1, 2))\nfor i in range(10):\n    print(i, i * i)
{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius", "days": [1, 2, 3], "rain": true}}
It's raining, isn't it? They're late; we'll wait, I'd say. Once upon a time there was a cat called Momo.
One, two, three, four, five, six, seven, eight, nine, ten. Red, green and blue are the colours of the light.
法国的首都是巴黎。意大利的首都是罗马。你好，世界！今天天气很好，我们去公园散步吧。你好吗？我很好，谢谢。
Größe, naïve, café, façade, señor, crème brûlée; привет, мир; こんにちは世界; 안녕하세요 세계; γειά σου κόσμε.
😀 😃 😄 👍 👍🏽 🚀 🎉 👩‍👩‍👧‍👦 ❤️ 🇫🇷 🌍 🐱 – emoji with joiners, skin tones and flags 😀😀😀 🚀🚀.
"""


def write_tiny_tokenizer(folder: Path) -> int:
    """Write the tokenizer files into `folder`; return how many ids it knows (they are dense from 0)."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(_WORD), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.post_processor = ByteLevelProcessor(trim_offsets=False)
    trainer = BpeTrainer(
        vocab_size=_BPE_SIZE, initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN_ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(), indent=2))
    return tokenizer.get_vocab_size()


def _tokenizer_config() -> dict[str, object]:
    template = Path(__file__).with_name("tiny_chat_template.jinja").read_text()
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": 131072,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
