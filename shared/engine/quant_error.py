"""What quantised KV does to a model's logits: the same tokens are run on exact and on quantised KV of a prompt.

For a worker's start and for benchmarks: it uses a runner and blocks of its cache that nobody else uses meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from shared.engine.kv_access import KvAccess
from shared.engine.kv_cache import CacheShape
from shared.engine.runner import StepRunner
from shared.engine.sequence import Group, Mode
from shared.engine.step import Chunk, Step
from shared.kv.quant import Quantised, Quantiser
from shared.kv.shape import KINDS, Kind, WireFormat
from shared.wire import Sampling, Work

_TIMEOUT_S = 1.0  # of work that nobody waits for


@dataclass(frozen=True)
class QuantError:
    """One prompt's KV in one format.

    logit: the largest difference of any logit. num_equal: of `num_tokens` positions, those whose best token is the
    same; if all are, a greedy answer is too. kv_bytes: K and V as they are; wire_bytes: as they would travel.
    quantise_s, dequantise_s: CPU time, for all of it.
    """

    wire: WireFormat
    logit: float
    num_equal: int
    num_tokens: int
    kv_bytes: int
    wire_bytes: int
    quantise_s: float
    dequantise_s: float


class QuantProbe:
    """Uses the first blocks of the runner's cache. most_tokens: that they have room for."""

    def __init__(self, runner: StepRunner, kv: KvAccess, shape: CacheShape) -> None:
        self._runner = runner
        self._kv = kv
        self._block_size = shape.block_size
        self.most_tokens = shape.num_blocks * shape.block_size

    def greedy(self, prompt: Sequence[int], num_tokens: int, eos_token_ids: Sequence[int]) -> list[int]:
        """The model's answer; an end token is its last."""
        token_ids = list(prompt)
        logits = self._run(token_ids, 0, num_rows=1)
        while len(token_ids) < len(prompt) + num_tokens:
            token_ids.append(int(logits[-1].argmax()))
            if token_ids[-1] in eos_token_ids:
                break
            logits = self._run(token_ids, len(token_ids) - 1, num_rows=1)
        return token_ids[len(prompt) :]

    def errors(
        self, token_ids: Sequence[int], num_prompt: int, wires: Sequence[WireFormat]
    ) -> list[QuantError]:
        """Quantise KV of the first `num_prompt` tokens, for each format, and run the other tokens on it.

        Raises shared.kv.quant.NotFinite.
        """
        token_ids = list(token_ids)
        self._run(token_ids[:num_prompt], 0, num_rows=1)
        source = self._kv.source(self._blocks(num_prompt))
        exact = {
            (layer, kind): b"".join(source.views(layer, kind, 0, num_prompt))
            for layer, kind in self._tensors()
        }
        reference = self._run(token_ids, num_prompt, num_rows=None)
        return [self._error(token_ids, num_prompt, wire, exact, reference) for wire in wires]

    def _error(
        self,
        token_ids: list[int],
        num_prompt: int,
        wire: WireFormat,
        exact: dict[tuple[int, Kind], bytes],
        reference: Tensor,
    ) -> QuantError:
        quantiser = Quantiser(self._kv.shape, wire)
        sizes = (quantiser.code_bytes(num_prompt), *[quantiser.scale_bytes(num_prompt)] * 2)
        quantised = Quantised(*(memoryview(bytearray(size)) for size in sizes))
        result = memoryview(bytearray(num_prompt * self._kv.shape.row_bytes))
        sink = self._kv.sink(self._blocks(num_prompt))
        quantise_s = dequantise_s = 0.0
        for (layer, kind), content in exact.items():
            began = time.thread_time()
            quantiser.quantise(memoryview(content), quantised)
            between = time.thread_time()
            quantiser.dequantise(quantised, result)
            dequantise_s += time.thread_time() - between
            quantise_s += between - began
            at = 0
            for view in sink.views(layer, kind, 0, num_prompt):
                view[:] = result[at : at + len(view)]
                at += len(view)
        sink.chunk_filled(0, num_prompt)
        logits = self._run(token_ids, num_prompt, num_rows=None)
        equal = logits.argmax(dim=1) == reference.argmax(dim=1)
        return QuantError(
            wire=wire,
            logit=float((logits - reference).abs().max()),
            num_equal=int(equal.sum()),
            num_tokens=len(equal),
            kv_bytes=sum(map(len, exact.values())),
            wire_bytes=sum(sizes) * len(exact),
            quantise_s=quantise_s,
            dequantise_s=dequantise_s,
        )

    def _blocks(self, num_tokens: int) -> list[int]:
        return list(range(-(-num_tokens // self._block_size)))

    def _tensors(self) -> Iterator[tuple[int, Kind]]:
        return ((layer, kind) for layer in range(self._kv.shape.num_layers) for kind in KINDS)

    def _run(self, token_ids: list[int], start: int, *, num_rows: int | None) -> Tensor:
        """Compute positions [start, len(token_ids)); logits of the last `num_rows` of them, or of all."""
        sampling = Sampling(max_tokens=1, num_prompt_logprobs=None if num_rows else 0)
        work = Work(
            request_id="kv-quant",
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=sampling,
            timeout_s=_TIMEOUT_S,
        )
        group = Group(
            work, Mode.LOCAL, deadline=0.0, deliver=lambda _: None, blocks=self._blocks(len(token_ids))
        )
        return self._runner.run(Step(chunks=[Chunk(group, start, len(token_ids))]))
