"""A checkpoint's identity by content: two workers may exchange KV only if these are equal. Torch-free.

Names, paths and dates are no part of it. The weights are read through a mapping, at memory speed, at every start:
a stored digest could outlive the bytes it was made of.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import xxhash

from shared.models.error import ModelError
from shared.models.facts import describe_rope, read_facts
from shared.models.files import read_json, weight_files
from shared.wire import Fingerprint

# Keys of config.json that change no key or value of a computed token. A key that is not listed counts: an unknown
# one can then cause a refusal, but never a wrong answer.
_IRRELEVANT = frozenset(
    {
        "_name_or_path",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "max_position_embeddings",
        "max_window_layers",
        "pad_token_id",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def fingerprint(folder: Path, dtype_name: str, layout: str) -> Fingerprint:
    """What the model in `folder`, served in `dtype_name` with KV in `layout`, is compared by. Raises ModelError."""
    facts = read_facts(folder)
    return Fingerprint(
        weights=weights_digest(folder),
        config=config_digest(folder),
        tokenizer=tokenizer_digest(folder),
        dtype=dtype_name,
        layout=layout,
        rope=facts.rope,
        num_layers=facts.num_layers,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
    )


def weights_digest(folder: Path) -> str:
    """Hex digest over the bytes of the safetensors files, in name order."""
    digest = xxhash.xxh3_128()
    for path in weight_files(folder):
        _add_file(digest, path)
    return digest.hexdigest()


def config_digest(folder: Path) -> str:
    """Hex digest over the keys of config.json that make a difference to what is computed."""
    config = read_json(folder / "config.json")
    kept = {key: value for key, value in config.items() if key not in _IRRELEVANT}
    kept["rope"] = describe_rope(config)
    return xxhash.xxh3_128_hexdigest(json.dumps(kept, sort_keys=True).encode())


def tokenizer_digest(folder: Path) -> str:
    """Hex digest over tokenizer.json."""
    digest = xxhash.xxh3_128()
    _add_file(digest, folder / "tokenizer.json")
    return digest.hexdigest()


def _add_file(digest: xxhash.xxh3_128, path: Path) -> None:
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            digest.update(len(mapped).to_bytes(8, "little"))  # so that moving a border between files shows
            digest.update(mapped)
    except (OSError, ValueError) as exc:
        raise ModelError(f"cannot read {path}: {exc}") from exc
