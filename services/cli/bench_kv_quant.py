"""`handoff bench kv-quant`: what int8 and fp8 KV save on the wire, what they cost, and what they do to the answers.

Each prompt is answered greedily on exact KV. Then the same answer is run on quantised KV of the prompt: a position
agrees if its best token is the same. If all do, the greedy answer is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from loadtest.report import show
from shared.engine.kv_access import kv_access
from shared.engine.kv_cache import CacheShape, KVCache
from shared.engine.probe_texts import PROBE_TEXTS, tokenise
from shared.engine.quant_error import QuantError, QuantProbe
from shared.engine.runner import Runner
from shared.kv.shape import WIRE_FORMATS, WireFormat
from shared.models.facts import read_facts
from shared.models.load import SERVING_DTYPES, load_model

_BLOCK_SIZE = 16


@dataclass
class Result:
    """errors[format]: one for each prompt."""

    errors: dict[WireFormat, list[QuantError]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """For machines."""
        return {
            wire: {**asdict(_Total.of(errors)), "prompts": [asdict(error) for error in errors]}
            for wire, errors in self.errors.items()
        }


@dataclass(frozen=True)
class _Total:
    """Over all prompts. logit: the largest; pays_below_bytes_per_s: the link on which time saved is time spent."""

    logit: float
    equal_answers: int
    num_answers: int
    equal_tokens: int
    num_tokens: int
    saved_share: float
    quantise_bytes_per_s: float
    dequantise_bytes_per_s: float
    pays_below_bytes_per_s: float

    @classmethod
    def of(cls, errors: Sequence[QuantError]) -> _Total:
        kv_bytes = sum(error.kv_bytes for error in errors)
        saved_bytes = kv_bytes - sum(error.wire_bytes for error in errors)
        quantise_s = sum(error.quantise_s for error in errors)
        dequantise_s = sum(error.dequantise_s for error in errors)
        return cls(
            logit=max(error.logit for error in errors),
            equal_answers=sum(error.num_equal == error.num_tokens for error in errors),
            num_answers=len(errors),
            equal_tokens=sum(error.num_equal for error in errors),
            num_tokens=sum(error.num_tokens for error in errors),
            saved_share=saved_bytes / kv_bytes,
            quantise_bytes_per_s=kv_bytes / quantise_s,
            dequantise_bytes_per_s=kv_bytes / dequantise_s,
            pays_below_bytes_per_s=saved_bytes / (quantise_s + dequantise_s),
        )


def measure_kv_quant(
    folder: Path, dtype_name: str, *, prompt_tokens: int, num_tokens: int, report: Callable[[str], None]
) -> Result:
    """Run the last tokens of every text with every format on the model in `folder`, on this process's threads.

    Raises ValueError, ModelError.
    """
    facts, dtype = read_facts(folder), SERVING_DTYPES[dtype_name]
    prompts = [tokenise(text, folder)[-prompt_tokens:] for text in PROBE_TEXTS]
    longest = max(map(len, prompts)) + num_tokens
    if longest > facts.max_position_embeddings:
        raise ValueError(f"the model takes {facts.max_position_embeddings} tokens, {longest} are needed")
    shape = CacheShape(
        num_layers=facts.num_layers,
        num_blocks=-(-longest // _BLOCK_SIZE),
        block_size=_BLOCK_SIZE,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        dtype=dtype,
    )
    device = torch.device("cpu")
    cache = KVCache(shape, device)
    runner = Runner(load_model(folder, dtype, device), cache)
    probe = QuantProbe(runner, kv_access(cache), shape)
    result = Result({wire: [] for wire in WIRE_FORMATS})
    for index, prompt in enumerate(prompts):
        report(f"prompt {index + 1} of {len(prompts)}: {len(prompt)} tokens")
        answer = probe.greedy(prompt, num_tokens, facts.eos_token_ids)
        for error in probe.errors([*prompt, *answer], len(prompt), WIRE_FORMATS):
            result.errors[error.wire].append(error)
    return result


def print_kv_quant(console: Console, result: Result) -> None:
    """The table."""
    rows: Mapping[str, Callable[[_Total], str]] = {
        "bytes saved": lambda total: f"{total.saved_share:.1%}",
        "quantise, GB of KV per CPU second": lambda total: f"{total.quantise_bytes_per_s / 1e9:.2f}",
        "dequantise, GB of KV per CPU second": lambda total: f"{total.dequantise_bytes_per_s / 1e9:.2f}",
        "saves time on links below": lambda total: f"{total.pays_below_bytes_per_s * 8 / 1e9:.1f} Gbit/s",
        "equal greedy answers": lambda total: f"{total.equal_answers} of {total.num_answers}",
        "equal tokens": lambda total: f"{total.equal_tokens} of {total.num_tokens}",
        "largest logit difference": lambda total: f"{total.logit:.3f}",
    }
    totals = [_Total.of(errors) for errors in result.errors.values()]
    table = Table()
    table.add_column("")
    for wire in result.errors:
        table.add_column(wire, justify="right")
    for name, text in rows.items():
        table.add_row(name, *map(text, totals))
    show(console, "KV on the wire against exact KV", table)
