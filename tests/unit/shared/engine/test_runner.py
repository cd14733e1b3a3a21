"""Our packed forward pass over the block pool against transformers' own."""

from __future__ import annotations

import random
from collections.abc import Sequence as Ids

import pytest
import torch
from torch import Tensor

from shared.engine.attention import StepAbandoned
from shared.engine.kv_cache import CacheShape, KVCache
from shared.engine.runner import Runner
from shared.engine.sequence import Group, Mode, Sequence
from shared.engine.step import Chunk, Step
from tests.unit.shared.engine.conftest import TinyModel
from tests.unit.shared.engine.helpers import make_work

NUM_POSITIONS = 640


class Bench:
    """A runner with its cache, and blocks that are handed out in a shuffled order."""

    def __init__(self, tiny: TinyModel, block_size: int = 16) -> None:
        config = tiny.model.config
        num_blocks = NUM_POSITIONS // block_size
        shape = CacheShape(
            num_layers=config.num_hidden_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
            dtype=torch.float32,
        )
        self.cache = KVCache(shape, torch.device("cpu"))
        for tensor in (*self.cache.k, *self.cache.v):
            tensor.fill_(torch.nan)  # whatever is read without having been written shows
        self.runner = Runner(tiny.model, self.cache)
        self._free = list(range(num_blocks))
        random.Random(0).shuffle(self._free)

    def group(self, tokens: Ids[int], *, room: int = 0) -> Group:
        """A prompt with blocks for it and `room` more positions."""
        group = Group(make_work(tokens), Mode.LOCAL, 1e9, print)
        num_blocks = -(-(len(tokens) + room) // self.cache.shape.block_size)
        group.blocks = [self._free.pop() for _ in range(num_blocks)]
        return group

    def prompt(self, group: Group, chunk_size: int) -> Tensor:
        """Logits after a prompt that is run in chunks."""
        end, logits = len(group.token_ids), torch.empty(0)
        for start in range(0, end, chunk_size):
            logits = self.runner.run(Step(chunks=[Chunk(group, start, min(end, start + chunk_size))]))
        return logits[0]


def _tokens(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(600) for _ in range(length)]


def _sequence(group: Group, outputs: list[int], choice: int = 0) -> Sequence:
    """The choice after its newest token was sampled and not run."""
    return Sequence(group, choice, group.blocks, outputs, len(group.token_ids) + len(outputs) - 1)


def _decode(bench: Bench, tokens: list[int], num_new: int) -> list[int]:
    """Greedy ids, prompt in one chunk."""
    group = bench.group(tokens, room=num_new)
    logits = bench.prompt(group, len(tokens))
    seq = _sequence(group, [int(logits.argmax())])
    while len(seq.outputs) < num_new:
        seq.outputs.append(int(bench.runner.run(Step(decodes=[seq]))[0].argmax()))
        seq.num_computed += 1
    return seq.outputs


@torch.inference_mode()
def _oracle_logits(tiny: TinyModel, tokens: Ids[int]) -> Tensor:
    logits: Tensor = tiny.oracle(torch.tensor([list(tokens)])).logits[0, -1]
    return logits


def _generate(tiny: TinyModel, tokens: list[int], num_new: int) -> list[int]:
    ids = torch.tensor([tokens])
    made = tiny.oracle.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_new,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=None,
        pad_token_id=0,
    )
    answer: list[int] = made[0, len(tokens) :].tolist()
    return answer


@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64, 1000])
def test_chunked_prompts_give_the_logits_of_a_whole_one(
    tiny: TinyModel, block_size: int, chunk_size: int
) -> None:
    """However a prompt is cut, and wherever its blocks lie, transformers' own logits come out."""
    tokens = _tokens(67)
    bench = Bench(tiny, block_size)
    group = bench.group(tokens)
    logits = bench.prompt(group, chunk_size)
    torch.testing.assert_close(logits, _oracle_logits(tiny, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_greedy_ids_equal_generate_around_block_boundaries(tiny: TinyModel, length: int) -> None:
    """Prompt and answer cross the boundary at every offset; not one id differs."""
    tokens = _tokens(length, seed=length)
    assert _generate(tiny, tokens, 20) == _decode(Bench(tiny), tokens, 20)


@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_a_mixed_step_gives_each_row_what_it_gets_alone(tiny: TinyModel, block_size: int) -> None:
    """Decodes, a first chunk, a middle chunk and a last chunk in one pass do not see each other."""
    bench = Bench(tiny, block_size)
    texts = [_tokens(n, seed=n) for n in (5, 33, 16)]
    sequences = []
    for text in texts:
        group = bench.group(text, room=2)
        bench.prompt(group, 1000)
        sequences.append(_sequence(group, [7]))
    whole, middle, last = (bench.group(_tokens(n, seed=n)) for n in (20, 50, 41))
    bench.runner.run(Step(chunks=[Chunk(middle, 0, 17), Chunk(last, 0, 40)]))
    step = Step(decodes=sequences, chunks=[Chunk(middle, 17, 30), Chunk(last, 40, 41), Chunk(whole, 0, 20)])
    wanted = [_oracle_logits(tiny, [*text, 7]) for text in texts]
    wanted += [_oracle_logits(tiny, group.token_ids) for group in (last, whole)]
    torch.testing.assert_close(bench.runner.run(step), torch.stack(wanted), atol=1e-4, rtol=1e-4)


def test_a_step_without_a_finished_prompt_has_no_rows(tiny: TinyModel) -> None:
    """Chunks in the middle of a prompt yield no logits."""
    bench = Bench(tiny)
    group = bench.group(_tokens(40))
    assert (0, tiny.model.config.vocab_size) == bench.runner.run(Step(chunks=[Chunk(group, 0, 20)])).shape


def test_kv_does_not_depend_on_how_it_was_computed(tiny: TinyModel) -> None:
    """A block that one request computed in chunks serves another: same prompt, same KV."""
    tokens = _tokens(48)
    bench = Bench(tiny)
    whole, chunked = bench.group(tokens), bench.group(tokens)
    bench.prompt(whole, 48)
    bench.prompt(chunked, 7)
    for tensor in (*bench.cache.k, *bench.cache.v):
        torch.testing.assert_close(tensor[whole.blocks], tensor[chunked.blocks], atol=1e-5, rtol=1e-4)


def test_a_suffix_on_cached_blocks_gives_the_logits_of_the_whole(tiny: TinyModel) -> None:
    """A prefix hit: the first 32 positions are another request's blocks."""
    tokens = _tokens(45)
    bench = Bench(tiny)
    first = bench.group(tokens[:32])
    bench.prompt(first, 32)
    second = bench.group(tokens)
    second.blocks[:2] = first.blocks
    logits = bench.runner.run(Step(chunks=[Chunk(second, 32, 45)]))[0]
    torch.testing.assert_close(logits, _oracle_logits(tiny, tokens), atol=1e-4, rtol=1e-4)


def test_copied_blocks_let_two_choices_go_apart(tiny: TinyModel) -> None:
    """Copy-on-write happens before the step writes: each choice sees its own tokens after the shared prompt."""
    tokens = _tokens(20)
    bench = Bench(tiny)
    group = bench.group(tokens)
    bench.prompt(group, 20)
    one, other = _sequence(group, [3], 0), _sequence(group, [4], 1)
    one.table = [group.blocks[0], bench.group([1]).blocks[0]]
    logits = bench.runner.run(Step(decodes=[one, other], copies=[(group.blocks[1], one.table[1])]))
    wanted = torch.stack([_oracle_logits(tiny, [*tokens, t]) for t in (3, 4)])
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


def test_an_unwanted_step_stops_between_two_layers(tiny: TinyModel) -> None:
    """A cancelled prompt does not cost its remaining layers."""
    bench = Bench(tiny)
    group = bench.group(_tokens(16))
    group.cancelled = True
    with pytest.raises(StepAbandoned):
        bench.prompt(group, 16)
    assert bench.cache.k[0].isnan().all()


class LayersSeen:
    """A sender's progress that looks at the cache whenever it is told of a layer."""

    is_amid_layers = False

    def __init__(self, bench: Bench, group: Group) -> None:
        self._cache = bench.cache
        self._group = group
        self.seen: list[tuple[int, int, list[bool]]] = []

    def advance_layers(self, num_computed: int, num_layers: int) -> None:
        index = torch.tensor(self._group.blocks)
        written = [
            not bool(torch.cat([k[index], v[index]]).flatten(1, 2)[:, :, 0].isnan().any())
            for k, v in zip(self._cache.k, self._cache.v, strict=True)
        ]
        self.seen.append((num_computed, num_layers, written))

    def advance(self, num_computed: int) -> None: ...

    def finish(self, first_tokens: Ids[int], finished: Ids[bool]) -> None: ...

    def cancel(self, reason: str) -> None: ...


def test_each_layer_of_the_last_chunk_is_told_when_it_is_written(tiny: TinyModel) -> None:
    """Told with K and V of that layer in the pool and later ones still missing; earlier chunks tell nothing."""
    bench = Bench(tiny)
    group = bench.group(_tokens(64))
    progress = LayersSeen(bench, group)
    group.progress = progress
    bench.prompt(group, chunk_size=32)

    num_layers = bench.cache.shape.num_layers
    told = [(64, layer, [other < layer for other in range(num_layers)]) for layer in range(1, num_layers + 1)]
    assert told == progress.seen
