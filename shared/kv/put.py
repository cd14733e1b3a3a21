"""PUTs of KV on one connection, one after the other: head, checks, body straight into the pool, answer.

Nothing of a body is read before its ticket is verified and its reservation claimed; nothing is written to the pool
but while the claim is held.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus

from shared.errors import InvalidRequest, ManifestMismatch, ReservationGone, TooLarge, Unauthorized
from shared.kv.answers import NotAPut, answer_of, say_and_keep, say_last_word, too_many
from shared.kv.book import Claim, ReceiveBook, Received
from shared.kv.carrier import Body, Carrier
from shared.kv.decoder import BlobDecoder
from shared.kv.http_head import CONTINUE, RequestHead
from shared.kv.layout import total_bytes_bounds
from shared.kv.limits import Pace, ReceiveLimits
from shared.kv.peer import Peer
from shared.kv.section import Section
from shared.kv.stream import Interrupted
from shared.kv.ticket import KV_PATH, TICKET_HEADER, Ticket

_PATH = re.compile(re.escape(KV_PATH) + r"([A-Za-z0-9._-]{1,128})")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class PutReport:
    """How one PUT ended, for logs and metrics.

    status: as answered; 0 if the peer was gone. received: what was committed, else error says why not; an error
    outside ServingError with status 500 is a bug of ours.
    """

    status: int
    transport: str
    handoff_id: str | None
    request_id: str | None
    received: Received | None
    error: Exception | None
    duration_s: float


def serve_put(peer: Peer, book: ReceiveBook, secret: bytes, limits: ReceiveLimits) -> tuple[PutReport, bool]:
    """Receive, answer, drain; and whether the connection can carry another PUT.

    Never raises for what a peer or a claim did. An interrupt from outside (the listener closes, or needs the place)
    is answered 503.
    """
    began = time.monotonic()
    put = _Put(peer, book, secret, limits)
    error: Exception | None = None
    status: int = HTTPStatus.OK
    try:
        put.receive()
    except Exception as exc:  # noqa: BLE001 - answered as 500 and reported, whatever it is
        error = too_many() if peer.gives_way and isinstance(exc, Interrupted) else exc
        status, body = answer_of(None, error)
        put.keeps = False
        if status:
            # Somebody waits for the place of one that gives way.
            patience = replace(limits, drain_bytes=0) if peer.gives_way else limits
            say_last_word(peer.stream, status, body, patience)
    report = PutReport(
        status=status,
        transport=put.transport,
        handoff_id=put.handoff_id,
        request_id=put.request_id,
        received=put.received,
        error=error,
        duration_s=time.monotonic() - began,
    )
    return report, put.keeps


def _too_slow() -> NotAPut:
    return NotAPut(HTTPStatus.REQUEST_TIMEOUT, "the request came too slowly")


class _Put:
    """What is known of one PUT so far."""

    def __init__(self, peer: Peer, book: ReceiveBook, secret: bytes, limits: ReceiveLimits) -> None:
        self.transport = peer.transport
        self.keeps = False
        self.handoff_id: str | None = None
        self.request_id: str | None = None
        self.received: Received | None = None
        self._peer = peer
        self._stream = peer.stream
        self._book = book
        self._secret = secret
        self._limits = limits
        self._carrier: Carrier | None = None
        self._aborted = False

    def receive(self) -> None:
        """From the first byte to the commit."""
        try:
            deadline = time.monotonic() + self._limits.head_s
            head, early = self._peer.read_head(self._limits.max_head_bytes, deadline)
            length = self._check_head(head)
            ticket = self._check_ticket(head)
            self._carrier = self._peer.carrier_for(head)
        except TimeoutError as exc:
            raise _too_slow() from exc
        finally:
            self._peer.drop_descriptors()
        if self._carrier is not None:
            self.transport = self._carrier.name
        claim = self._book.claim(ticket)
        try:
            self._answer(self._fill(claim, head, length, early))
        finally:
            # After the answer: whoever takes the KV over may compute on this core from now on.
            claim.release()

    def _check_head(self, head: RequestHead) -> int:
        """The body's length, if this is a PUT of KV."""
        request_id = head.headers.get("x-request-id", "")
        self.request_id = request_id if _REQUEST_ID.fullmatch(request_id) else None
        match = _PATH.fullmatch(head.target)
        if match is None:
            raise NotAPut(HTTPStatus.NOT_FOUND, "there is nothing at this path")
        if head.method != "PUT":
            raise NotAPut(HTTPStatus.METHOD_NOT_ALLOWED, "only PUT is allowed here")
        if "transfer-encoding" in head.headers or "content-length" not in head.headers:
            raise NotAPut(HTTPStatus.LENGTH_REQUIRED, "the body needs a Content-Length and no other framing")
        self.handoff_id = match[1]
        self.keeps = head.keeps
        return int(head.headers["content-length"])

    def _check_ticket(self, head: RequestHead) -> Ticket:
        ticket = Ticket.verify(head.headers.get(TICKET_HEADER.lower(), ""), self._secret)
        if ticket.handoff_id != self.handoff_id:
            raise Unauthorized("the KV ticket is for another hand-off")
        self._peer.has_ticket = True
        return ticket

    def _answer(self, received: Received) -> None:
        """That the KV is there. If the peer does not hear it, nothing is lost but the connection."""
        status, body = answer_of(received, None)
        if self.keeps:
            self.keeps = say_and_keep(self._stream, status, body, self._limits)
        else:
            say_last_word(self._stream, status, body, self._limits)

    def _fill(self, claim: Claim, head: RequestHead, length: int, early: bytes) -> Received:
        """From the first byte of the body to the commit."""
        least, most = total_bytes_bounds(claim.expected, self._limits.max_header_bytes)
        if length > most:
            raise TooLarge(f"the KV of this reservation is at most {most} bytes long")
        if length < least and self._carrier is None:
            raise ManifestMismatch(f"the KV of this reservation is at least {least} bytes long")
        if len(early) > length:
            raise InvalidRequest("more came than Content-Length says")
        claim.attach(self._abort)
        try:
            if head.expects_continue and not early:
                self._stream.send_all([CONTINUE], time.monotonic() + self._limits.answer_s)
            received = self._read_body(claim, length, early)
        except TimeoutError as exc:
            raise _too_slow() from exc
        except Interrupted as exc:
            if self._aborted:
                raise ReservationGone("the reservation was cancelled while its KV arrived") from exc
            raise
        claim.commit(received)
        self.received = received
        return received

    def _read_body(self, claim: Claim, length: int, early: bytes) -> Received:
        pace = Pace(self._limits)
        left = memoryview(early)

        def receive(buffers: Sequence[memoryview], section: Section) -> int:
            nonlocal left
            if not left:
                return self._stream.recv_into(buffers, pace.deadline(section))
            self._stream.check_interrupted()
            taken = min(len(buffers[0]), len(left))
            buffers[0][:taken] = left[:taken]
            left = left[taken:]
            return taken

        body = Body(receive, pace.deadline, self._stream)
        decoder = BlobDecoder(
            claim.expected,
            claim.sink,
            total_bytes=length,
            max_header_bytes=self._limits.max_header_bytes,
            slots=None if self._carrier is None else self._carrier.slots(body),
            scratch=self._peer.scratch,
        )
        return decoder.read(receive)

    def _abort(self) -> None:
        """For the claim's owner, from any thread: write nothing more."""
        self._aborted = True
        self._stream.interrupt()
