"""Send hand-offs' KV: which way, over which connection, and what becomes of failures.

Blocking; runs in a worker thread of the prefill process, beside the engine thread that feeds `Progress`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from shared.errors import BackendError, BackendTimeout, TransportFailed
from shared.kv.connections import ConnectionPool
from shared.kv.layout import BlobLayout
from shared.kv.outgoing import OutgoingPut, Send, SendTimeouts, Stale
from shared.kv.progress import Progress
from shared.kv.quant_chunk import CannotQuantise
from shared.kv.quant_layout import blob_layout
from shared.kv.stream import Interrupted
from shared.kv.ticket import Ticket, ticket_of
from shared.kv.transports.base import Connection, Transport, TransportUnavailable
from shared.wire import Sent

_AVOID_S = 60.0
_MAX_LAST_WORD_BYTES = 64 * 1024


class KvSender:
    """Sends hand-offs of one prefill process. Thread-safe.

    transports: in order of preference. Of those that the reservation offers, the first that connects is used; one
    that then fails between these two workers comes last for a while. They are closed with the sender.
    """

    def __init__(self, secret: bytes, transports: Sequence[Transport], timeouts: SendTimeouts) -> None:
        self._secret = secret
        self._transports = transports
        self._timeouts = timeouts
        self._connections = ConnectionPool()
        self._avoided_until: dict[tuple[str, str], float] = {}

    def send(self, send: Send) -> Sent:
        """Send KV and first tokens to the issuer of a verified ticket; returns when decode has injected them.

        Connects at once, so call it when prefill of the request starts: from then on the peer has a thread for it.
        Raises Unauthorized; HandoffError (409, 410, 422) or Overloaded when the peer says so; BackendError;
        BackendTimeout; TransferCancelled soon after `progress.cancel`, whatever it was doing.
        """
        ticket = ticket_of(send.handoff, self._secret)
        try:
            return self._send_one_way(self._ways(ticket, send.handoff.transports), send)
        except Interrupted:
            send.progress.check_cancelled()
            raise
        except TimeoutError as exc:
            send.progress.check_cancelled()
            raise BackendTimeout("the decode worker did not take the KV in its time") from exc
        except OSError as exc:
            # After a cancel a broken connection is the cancel.
            send.progress.check_cancelled()
            raise BackendError("the connection to the decode worker broke") from exc

    def close(self) -> None:
        """Close kept connections and the transports. Call it when no send is under way any more."""
        self._connections.close()
        for transport in self._transports:
            transport.close()

    def _send_one_way(self, ways: Sequence[tuple[Transport, str]], send: Send) -> Sent:
        """By the first of them that works. Raises what `send` does, and what sockets raise."""
        failure: Exception = BackendError("no transport leads to the decode worker")
        for transport, address in ways:
            try:
                return self._send_agreed(transport, address, send)
            except (TransportUnavailable, TransportFailed, _CouldNotConnect) as exc:
                failure = exc.__cause__ if isinstance(exc.__cause__, OSError) else exc
                if isinstance(exc, TransportFailed):
                    self._avoid(transport.name, address)
        if isinstance(failure, TransportUnavailable):
            raise BackendError(str(failure)) from failure
        raise failure

    def _ways(self, ticket: Ticket, offered: Sequence[str]) -> list[tuple[Transport, str]]:
        """Transports and where they lead; those to be avoided last, for there may be no other."""
        ways = [
            (transport, address)
            for transport in self._transports
            if transport.name in offered and (address := transport.address(ticket)) is not None
        ]
        if self._avoided_until:
            ways.sort(key=lambda way: self._is_avoided(way[0].name, way[1]))
        return ways

    def _send_agreed(self, transport: Transport, address: str, send: Send) -> Sent:
        """Quantised if that is agreed; exact after all if this KV cannot be. Raises as `_send_over`."""
        try:
            return self._send_over(transport, address, send, send.layout(transport))
        except CannotQuantise:
            return self._send_over(transport, address, send, blob_layout(send.manifest))

    def _send_over(self, transport: Transport, address: str, send: Send, layout: BlobLayout) -> Sent:
        """Over a kept connection, or a new one. Raises _CouldNotConnect, TransportUnavailable."""
        key = (transport.name, address)
        while (kept := self._connections.take(key)) is not None:
            with contextlib.suppress(Stale):
                return self._put(key, kept, send, layout, kept=True)
        return self._put(key, self._connect(transport, address, send.progress), send, layout, kept=False)

    def _connect(self, transport: Transport, address: str, progress: Progress) -> Connection:
        deadline = time.monotonic() + self._timeouts.connect_s
        while True:
            try:
                return transport.connect(address, deadline, progress.interrupting)
            except TransportUnavailable:
                # What it lacks may be what an idle connection holds.
                if not self._connections.close_one():
                    raise
            except OSError as exc:
                raise _CouldNotConnect from exc

    def _put(
        self, key: tuple[str, str], connection: Connection, send: Send, layout: BlobLayout, *, kept: bool
    ) -> Sent:
        try:
            with send.progress.interrupting(connection.stream.interrupt):
                put = OutgoingPut(connection, send, layout, self._timeouts)
                answer = put.run(kept=kept)
                stats = put.stats(key[0])
        except CannotQuantise:
            self._break_off(connection)
            raise
        except BaseException:
            connection.close()
            raise
        # A cancel may have come after the answer: it changes nothing for this hand-off, but for the next one.
        if answer.keeps and not connection.stream.interrupted:
            self._connections.give_back(key, connection)
        else:
            connection.close()
        return stats

    def _break_off(self, connection: Connection) -> None:
        """Close when the peer has noticed: until then the reservation takes no other PUT."""
        connection.stream.end_sending()
        connection.stream.drain(_MAX_LAST_WORD_BYTES, time.monotonic() + self._timeouts.io_s)
        connection.close()

    def _is_avoided(self, transport: str, address: str) -> bool:
        return time.monotonic() < self._avoided_until.get((transport, address), 0.0)

    def _avoid(self, transport: str, address: str) -> None:
        """For a while; what has passed is forgotten, for workers come and go."""
        now = time.monotonic()
        self._avoided_until = {way: until for way, until in self._avoided_until.items() if now < until}
        self._avoided_until[transport, address] = now + _AVOID_S


class _CouldNotConnect(Exception):
    """Nothing was sent."""
