"""One side of a hand-off over NIXL as a program, for tests that put it into a network of its own.

`receive ADDRESS` prints a grant as one line, and a line for each PUT until its input ends. `send` reads a grant and
sends the same KV three times; it prints the transport of each.
"""

from __future__ import annotations

import sys

from services.cli.transfer_kv import Book
from shared.kv.limits import ReceiveLimits
from shared.kv.outgoing import Send, SendTimeouts
from shared.kv.put import PutReport
from shared.kv.receiver import KvListener
from shared.kv.sender import KvSender
from shared.kv.shape import KvShape
from shared.kv.ticket import Ticket
from shared.kv.transports.choice import offered, usable
from shared.wire import Handoff
from tests.unit.shared.kv.blobs import Pool, expected, manifest_for
from tests.unit.shared.kv.transfer import finished

SECRET = b"two networks"
TRANSPORTS = "nixl,tcp"
SHAPE = KvShape(num_layers=8, num_kv_heads=4, head_dim=64, dtype="BF16")
WANT = expected(num_tokens=700, shape=SHAPE)
NUM_PUTS = 3


def receive(address: str) -> None:
    """Decode's side, listening to an address of this network."""
    pool = Pool(SHAPE, num_tokens=WANT.num_tokens, block_size=32)
    content = source().content()

    def on_end(report: PutReport) -> None:
        whole = "whole" if pool.content() == content else "damaged"
        pool.erase(0)
        print(report.status, report.transport, whole, flush=True)  # noqa: T201 - a program's answer

    offer = offered(TRANSPORTS)
    listener = KvListener(
        address,
        0,
        Book(pool.views(), lambda _: WANT),
        secret=SECRET,
        limits=ReceiveLimits(),
        on_end=on_end,
        transports=offer.transports,
        nixl=offer.nixl,
    )
    listener.start()
    url = listener.offer(address).kv_url("h1")
    grant = Handoff(
        handoff_id="h1",
        epoch=7,
        kv_url=url,
        ticket=Ticket("h1", 7, url, "boot", 1e18).sign(SECRET),
        have_tokens=0,
        transports=listener.offer(address).transports,
    )
    print(grant.model_dump_json(), flush=True)  # noqa: T201 - a program's answer
    sys.stdin.read()
    listener.close()


def send() -> None:
    """Prefill's side."""
    grant = Handoff.model_validate_json(sys.stdin.readline())
    pool = source()
    sender = KvSender(SECRET, usable(TRANSPORTS, pool=pool.memory, secret=SECRET), SendTimeouts())
    manifest = manifest_for(WANT, chunk_size=256)
    for _ in range(NUM_PUTS):
        sent = sender.send(Send(grant, "r1", manifest, pool.views(), finished()))
        print(sent.transport, flush=True)  # noqa: T201 - a program's answer
    sender.close()


def source() -> Pool:
    """The same bytes on both sides."""
    return Pool(SHAPE, num_tokens=WANT.num_tokens, block_size=16, seed=1)


if __name__ == "__main__":
    if sys.argv[1] == "send":
        send()
    else:
        receive(sys.argv[1].split()[1])
