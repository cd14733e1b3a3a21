"""Settings to a loaded worker: checkpoint, model, pool and engine. The only place where a worker meets torch."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import torch

from shared.engine.blocks import BlockPool
from shared.engine.engine import Engine
from shared.engine.grammar import GrammarCompiler
from shared.engine.kv_access import kv_access
from shared.engine.kv_cache import CacheShape, KVCache
from shared.engine.quant_error import QuantProbe
from shared.engine.runner import Runner
from shared.engine.step import Limits
from shared.kv.copy_rows import compiled
from shared.kv.pages_ahead import PagesAhead
from shared.kv.pool_memory import PoolMemory
from shared.kv.shape import KvShape, WireFormat
from shared.kv.source import KvSink, KvSource
from shared.models.facts import ModelFacts, read_facts
from shared.models.fingerprint import fingerprint
from shared.models.load import SERVING_DTYPES, load_model
from shared.models.prepare import ensure_checkpoint, model_name
from shared.settings import BadSettings
from shared.wire import Fingerprint, Role
from shared.worker.grammars import Grammars
from shared.worker.settings import WorkerSettings, parse_cpus
from shared.worker.wire_guard import check_wire

log = structlog.get_logger()

KV_LAYOUT = "block,head,dim/1"
_CPU_POOL_BYTES = 4 << 30
_FEWEST_POSITIONS = 2  # a prompt of one token and an answer of one


@dataclass(frozen=True)
class Worker:
    """Everything an app needs of a loaded worker. boot: new at every start."""

    role: Role
    name: str
    boot: str
    model: str
    facts: ModelFacts
    fingerprint: Fingerprint
    kv_shape: KvShape
    limits: Limits
    pool: BlockPool
    engine: Engine
    grammars: Grammars
    kv_source: Callable[[Sequence[int]], KvSource]
    kv_sink: Callable[[Sequence[int]], KvSink]
    pool_memory: PoolMemory | None = None
    pages_ahead: PagesAhead | None = None
    kv_wire: WireFormat | None = None

    def blocks_in_use(self, blocks: Sequence[int]) -> None:
        """A request was given these: others will soon be given those after them."""
        if self.pages_ahead is not None and blocks:
            self.pages_ahead.reach(max(blocks))


def assemble(settings: WorkerSettings, role: Role, cache_dir: Path, report: Callable[[str], None]) -> Worker:
    """Find, convert if need be, and load the checkpoint; build the engine (not started).

    Raises ModelError or BadSettings.
    """
    _claim_cores(settings)
    device = _device(settings.device)
    dtype_name = settings.dtype
    if dtype_name == "auto":
        dtype_name = "bfloat16" if device.type == "cuda" else "float32"
    dtype = SERVING_DTYPES[dtype_name]
    folder = ensure_checkpoint(settings.model, dtype_name, cache_dir, report)
    facts = read_facts(folder)
    report(f"loading {model_name(folder)} ({dtype_name}) on {device}")
    model = load_model(folder, dtype, device)
    shape = CacheShape(
        num_layers=facts.num_layers,
        num_blocks=1,
        block_size=settings.block_size,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        dtype=dtype,
    )
    shape = shape.with_blocks(_pool_bytes(settings, device) // shape.block_bytes)
    if shape.num_blocks * shape.block_size < _FEWEST_POSITIONS:
        raise BadSettings(f"HANDOFF_KV_POOL_BYTES: too small, a block alone takes {shape.block_bytes} bytes")
    try:
        cache = KVCache(shape, device, shareable=settings.shares_pool)
    except (OSError, OverflowError, torch.OutOfMemoryError) as exc:
        raise BadSettings(f"HANDOFF_KV_POOL_BYTES: so much memory cannot be had on {device}: {exc}") from exc
    pool = BlockPool(shape.num_blocks, shape.block_size)
    limits = _limits(settings, facts, shape)
    log.info(
        "worker_loaded",
        device=str(device),
        device_free_bytes=_free_bytes(device),
        dtype=dtype_name,
        threads=torch.get_num_threads(),
        num_blocks=shape.num_blocks,
        max_model_len=limits.max_model_len,
        kv_in_one_pass=compiled() is not None,
    )
    kv, runner = kv_access(cache), Runner(model, cache)
    pages_ahead = None if kv.memory is None else PagesAhead(kv.memory)
    kv_wire = None if settings.kv_wire == "none" else settings.kv_wire
    if kv_wire is not None:
        probe = QuantProbe(runner, kv, shape)
        check_wire(kv_wire, settings.kv_wire_max_error, probe, folder, limits.max_model_len)
    return Worker(
        role=role,
        name=settings.name or f"{role}-{os.getpid()}",
        boot=secrets.token_hex(8),
        model=model_name(folder),
        facts=facts,
        fingerprint=fingerprint(folder, dtype_name, KV_LAYOUT),
        kv_shape=kv.shape,
        limits=limits,
        pool=pool,
        engine=Engine(pool, limits, runner, facts.eos_token_ids),
        grammars=Grammars(partial(_grammar_compiler, folder, facts)),
        kv_source=kv.source,
        kv_sink=kv.sink,
        pool_memory=kv.memory,
        pages_ahead=pages_ahead,
        kv_wire=kv_wire,
    )


def _grammar_compiler(folder: Path, facts: ModelFacts) -> GrammarCompiler:
    return GrammarCompiler.load(folder, vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids)


def _claim_cores(settings: WorkerSettings) -> None:
    """Keep to the given cores, with one compute thread for each of them.

    Two workers that share cores are several times slower than one thread each, so this comes before any compute.
    """
    available = os.sched_getaffinity(0)
    cores = parse_cpus(settings.cpus) if settings.cpus else available
    if not cores <= available:
        raise BadSettings("HANDOFF_CPUS: names a core that this process may not use")
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(settings.num_threads or len(cores))


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadSettings(f"HANDOFF_DEVICE: there is no {wanted} here")
    return device


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _pool_bytes(settings: WorkerSettings, device: torch.device) -> int:
    if settings.kv_pool_bytes is not None:
        return settings.kv_pool_bytes
    free = _free_bytes(device)
    return free * 8 // 10 if device.type == "cuda" else min(_CPU_POOL_BYTES, free // 8)


def _limits(settings: WorkerSettings, facts: ModelFacts, shape: CacheShape) -> Limits:
    capacity = shape.num_blocks * shape.block_size
    longest = min(facts.max_position_embeddings, capacity)
    wanted = settings.max_model_len or longest
    if wanted > longest:
        raise BadSettings(f"HANDOFF_MAX_MODEL_LEN: model and KV pool allow {longest} tokens")
    return Limits(
        chunk_size=settings.chunk_size,
        max_num_seqs=settings.max_num_seqs,
        max_queued=settings.max_queued,
        max_model_len=wanted,
        vocab_size=facts.vocab_size,
        queue_timeout_s=settings.queue_timeout_s,
    )
