"""Whether quantised KV is good enough on this worker's own model: measured before it may be used."""

from __future__ import annotations

from pathlib import Path

import structlog

from shared.engine.probe_texts import PROBE_TEXTS, tokenise
from shared.engine.quant_error import QuantError, QuantProbe
from shared.kv.quant import NotFinite
from shared.kv.shape import WireFormat
from shared.settings import BadSettings

log = structlog.get_logger()

_MOST_TOKENS = 256
_CONTINUATION = 32  # of each text, run on quantised KV of the rest of it
_FEWEST_TOKENS = 8


def check_wire(
    wire: WireFormat, max_error: float, probe: QuantProbe, folder: Path, max_model_len: int
) -> None:
    """Measure `wire` on every probe text. folder: whose tokenizer. Raises BadSettings above `max_error`."""
    longest = min(_MOST_TOKENS, max_model_len, probe.most_tokens)
    if longest < _FEWEST_TOKENS:
        raise BadSettings(f"HANDOFF_KV_WIRE: cannot be measured with {longest} tokens of KV")
    errors = []
    for text in PROBE_TEXTS:
        token_ids = tokenise(text, folder)[:longest]
        num_prompt = len(token_ids) - min(_CONTINUATION, len(token_ids) // 2)
        try:
            errors += probe.errors(token_ids, num_prompt, [wire])
        except NotFinite as exc:
            raise BadSettings(f"HANDOFF_KV_WIRE: {exc}") from exc
    _judge(wire, max_error, errors)


def _judge(wire: WireFormat, max_error: float, errors: list[QuantError]) -> None:
    worst = max(error.logit for error in errors)
    num_equal, num_tokens = sum(e.num_equal for e in errors), sum(e.num_tokens for e in errors)
    log.info("kv_wire_measured", kv_wire=wire, logit=round(worst, 4), equal=num_equal, tokens=num_tokens)
    if not worst <= max_error:
        raise BadSettings(
            f"HANDOFF_KV_WIRE: {wire} changes a logit of this model by {worst:.3f} ({num_equal} of {num_tokens} "
            f"greedy tokens stay the same), and HANDOFF_KV_WIRE_MAX_ERROR allows {max_error:g}"
        )
