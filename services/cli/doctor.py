"""`handoff doctor`: is this pair of workers healthy, how fast is everything between them, and does splitting pay?

Order: what can be read, then transfers, then compute. What makes later steps pointless ends the examination.
Exit status: 0 healthy, 1 a problem (one is printed), 2 usage.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic

import httpx

from services.cli.doctor_checks import Finding, Seen, check_hosts, check_pair
from services.cli.doctor_model import Link, Load, Measured, line
from services.cli.doctor_probe import MAX_PROBE_BYTES, TIMEOUT_S, Probes, Stall, Transfers, Worker
from services.cli.workers import WorkerProblem
from shared.kv.shape import KV_DTYPES, KvShape
from shared.wire import Sent, WorkerInfo

TRANSPORTS = ("shm", "unix", "tcp")
_SIZES = (1, 128, 1024)
_FIRST_PROMPT = 32
_GROWTH = 4
_POOL_SHARE = 4
_STALL_PROMPT = 512


@dataclass(frozen=True)
class Plan:
    """What is examined. prompts: the mix, in tokens. compute_s: seconds that timing of compute may take in all."""

    prefill_url: str
    decode_url: str
    secret: str
    prompts: tuple[int, ...]
    load: Load
    runs: int
    compute_s: float


@dataclass
class Report:
    """Everything found so far. `measured` is there when all of it could be measured.

    taken: the one of `transfers` that a request takes.
    """

    plan: Plan
    findings: list[Finding] = field(default_factory=list)
    seen: tuple[Seen, Seen] | None = None
    transfers: list[Transfers] = field(default_factory=list)
    taken: Transfers | None = None
    stall: Stall | None = None
    measured: Measured | None = None

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not any(finding.level == "problem" for finding in self.findings)


async def examine(plan: Plan, say: Callable[[str], None]) -> Report:
    """Look at the pair and measure it. say: told what happens now. Whatever fails is a finding."""
    report = Report(plan)
    timeout = httpx.Timeout(TIMEOUT_S, connect=5.0)
    headers = {"Authorization": f"Bearer {plan.secret}"}
    async with httpx.AsyncClient(headers=headers, timeout=timeout, trust_env=False) as client:
        prefill, decode = Worker(client, plan.prefill_url), Worker(client, plan.decode_url)
        try:
            say("asking both workers who they are")
            infos = [await worker.get("/v1/info", WorkerInfo) for worker in (prefill, decode)]
            report.findings += check_pair(*infos)
            if not report.healthy:
                return report
            probes = Probes(prefill, decode, random.Random())
            say("looking at hosts and clocks")
            # One after the other: on one host they would copy in each other's way.
            report.seen = await probes.look(prefill, infos[0]), await probes.look(decode, infos[1])
            report.findings += check_hosts(*report.seen)
            await _measure(report, report.seen, probes, say)
        except WorkerProblem as exc:
            report.findings.append(Finding("worker", "problem", str(exc)))
    return report


async def _measure(
    report: Report, seen: tuple[Seen, Seen], probes: Probes, say: Callable[[str], None]
) -> None:
    plan, (prefill, decode) = report.plan, seen
    mark = prefill.info.fingerprint
    shape = KvShape(mark.num_layers, mark.num_kv_heads, mark.head_dim, KV_DTYPES[mark.dtype])
    bytes_per_token = shape.bytes_per_token
    longest = longest_prompt(prefill.info, decode.info)
    sizes = [n for n in _SIZES if n <= longest and n * bytes_per_token <= MAX_PROBE_BYTES]
    if len(sizes) < 2:
        sizes = [1, max(2, min(longest, MAX_PROBE_BYTES // bytes_per_token))]
    link = await _measure_transfers(report, probes, sizes, bytes_per_token, say)
    if link is None:
        return
    say("measuring compute: prompts and decode steps")
    reserve_s = await probes.reserve_s(plan.runs)
    budget = Budget(plan.compute_s)
    await probes.local_prompt_s(_FIRST_PROMPT if longest >= _FIRST_PROMPT else 1)  # warms up what it must
    steps = [(1, await probes.step_s(1))]
    together = min(plan.load.running, decode.host.max_num_seqs)
    if together > 1:
        steps.append((together, await probes.step_s(together)))
    wanted = min(max(plan.prompts), longest)
    local = await prompt_times(probes.local_prompt_s, wanted, budget)
    remote = await prompt_times(probes.remote_prompt_s, wanted, Budget(budget.left_s))
    timed = int(min(local[-1][0], remote[-1][0]))
    if timed < wanted:
        text = f"none above {timed} tokens was timed on both workers, times above are extrapolated"
        text += ": --seconds gives more time"
        report.findings.append(Finding("prompts", "note", text))
    measured = Measured(
        local_s=line(local),
        remote_s=line(remote),
        step_s=line(steps),
        reserve_s=reserve_s,
        link=link,
        bytes_per_token=bytes_per_token,
        chunk_size=prefill.host.chunk_size,
    )
    size = int(min(_STALL_PROMPT, local[-1][0]))
    chunks = -(-size // (decode.host.chunk_size or size))
    if measured.local_s.at(size) < budget.left_s:
        say("measuring what a prompt does to a running answer")
        report.stall = await probes.stall(size, chunks + min(200, 8 + int(0.1 / max(steps[0][1], 1e-4))))
    report.measured = measured


async def _measure_transfers(
    report: Report, probes: Probes, sizes: list[int], bytes_per_token: int, say: Callable[[str], None]
) -> Link | None:
    """Every transport, alone; returns the one that a request takes, or None if none works."""
    offered = await probes.transports()
    for name in dict.fromkeys((*TRANSPORTS, *offered)):
        say(f"measuring transfers over {name}")
        report.transfers.append(await probes.transfers(name, sizes, bytes_per_token, report.plan.runs))
    report.findings += _transport_findings(report.transfers)
    working = [each.name for each in report.transfers if each.link is not None]
    if not working:
        return None
    say("asking prefill which of them it takes")
    # Its list and its order are its own: given the choice as in a request, it shows them.
    name = await probes.taken(working, sizes[-1])
    report.taken = taken = next(each for each in report.transfers if each.name == name)
    assert taken.largest is not None
    text = f"requests take {name}, as prefill prefers it; KV travels {travels(taken.largest)}"
    report.findings.append(Finding("hand-off", "ok", text))
    return taken.link


def travels(sent: Sent) -> str:
    """In which format KV travelled, and how much of it."""
    if sent.kv_wire is None:
        return "exact"
    return f"as {sent.kv_wire}, {sent.wire_bytes / max(sent.kv_bytes, 1):.0%} of its bytes"


class Budget:
    """Seconds that something may take."""

    def __init__(self, seconds: float) -> None:
        self._ends = monotonic() + seconds

    @property
    def left_s(self) -> float:
        """May be below 0."""
        return self._ends - monotonic()


async def prompt_times(
    measure: Callable[[int], Awaitable[float]], longest: int, budget: Budget
) -> list[tuple[float, float]]:
    """(tokens, seconds) for growing prompts, at least one, until the next would not fit into the budget."""
    times: list[tuple[float, float]] = []
    size = min(_FIRST_PROMPT, longest)
    while True:
        times.append((size, await measure(size)))
        if size == longest:
            return times
        following = min(size * _GROWTH, longest)
        # Attention makes long prompts a little dearer than in proportion.
        if times[-1][1] * following / size * 1.5 > budget.left_s:
            return times
        size = following


def longest_prompt(prefill: WorkerInfo, decode: WorkerInfo) -> int:
    """Tokens that a measurement may use: what both serve, and no more than a share of either pool."""
    shares = [info.num_blocks * info.block_size // _POOL_SHARE for info in (prefill, decode)]
    return max(2, min(*shares, prefill.max_model_len - 2, decode.max_model_len - 2))


def _transport_findings(transfers: list[Transfers]) -> list[Finding]:
    found = []
    for each in transfers:
        if each.problem is None:
            found.append(Finding("transport", "ok", f"{each.name} works"))
        elif each.name == "tcp":
            # Decode always offers it, and every other way may cease to work when a worker moves.
            found.append(
                Finding("transport", "problem", f"tcp does not work, is the KV port open? {each.problem}")
            )
        else:
            found.append(Finding("transport", "note", f"{each.name} is not used: {each.problem}"))
    return found
