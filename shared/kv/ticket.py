"""Tickets: the right to send KV of one hand-off to one URL, signed by decode with the shared secret.

    text = base64url(payload) "." base64url(HMAC-SHA256(secret, domain + payload))

A sender checks the signature, so that it never connects to a URL that no decode worker gave out. Only the
issuer checks boot and expiry: the expiry is on its own monotonic clock and means nothing elsewhere.
"""

from __future__ import annotations

import binascii
import hmac
import re
from dataclasses import asdict, dataclass

import orjson

from shared.errors import ReservationGone, Unauthorized
from shared.kv.mac import mac
from shared.wire import Handoff

TICKET_HEADER = "X-Handoff-Ticket"
KV_PATH = "/v1/kv/"
MAX_TICKET_CHARS = 2048

_DOMAIN = b"handoff kv ticket 1\0"
_TEXT = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]{43})")
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# RFC 4648, section 5. The library's own functions for it do the same in ten times as many steps.
_TO_URL_SAFE = bytes.maketrans(b"+/", b"-_")
_FROM_URL_SAFE = bytes.maketrans(b"-_", b"+/")


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a reservation grants. boot: the issuing process; expires_at: seconds on its monotonic clock.

    host_id, kv_socket: the host on which the issuer also listens to a Unix socket, and that socket's abstract name.
    """

    handoff_id: str
    epoch: int
    kv_url: str
    boot: str
    expires_at: float
    host_id: str | None = None
    kv_socket: str | None = None

    def sign(self, secret: bytes) -> str:
        """The ticket as URL-safe text. Raises ValueError for a field that could not be verified later."""
        if not _ID.fullmatch(self.handoff_id):
            raise ValueError("a handoff_id is 1 to 128 of A-Z a-z 0-9 . _ -")
        payload = orjson.dumps(asdict(self))
        text = f"{_encode(payload)}.{_encode(mac(secret, _DOMAIN, payload))}"
        if len(text) > MAX_TICKET_CHARS:
            raise ValueError(f"a ticket is at most {MAX_TICKET_CHARS} characters")
        return text

    @classmethod
    def verify(cls, text: str, secret: bytes) -> Ticket:
        """Read a ticket that `sign` made under the same secret. Raises Unauthorized."""
        match = _TEXT.fullmatch(text) if len(text) <= MAX_TICKET_CHARS else None
        if match is None:
            raise Unauthorized("the KV ticket is malformed")
        payload = _decode(match[1])
        if not hmac.compare_digest(_encode(mac(secret, _DOMAIN, payload)), match[2]):
            raise Unauthorized("the KV ticket is not signed by this system")
        try:
            return cls(**orjson.loads(payload))
        except (TypeError, orjson.JSONDecodeError) as exc:
            raise Unauthorized("the KV ticket is from another version") from exc

    def check_issuer(self, *, boot: str, now: float) -> None:
        """For the issuer: raise ReservationGone if it is from before a restart or has expired."""
        if self.boot != boot:
            raise ReservationGone("the reservation is from before a restart")
        if now >= self.expires_at:
            raise ReservationGone("the reservation has expired")


def kv_url(host: str, port: int, handoff_id: str) -> str:
    """Where the KV of one hand-off goes. host: as other workers reach it."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{KV_PATH}{handoff_id}"


def ticket_of(handoff: Handoff, secret: bytes) -> Ticket:
    """Verify a grant before anything is sent to its URL. Raises Unauthorized."""
    ticket = Ticket.verify(handoff.ticket, secret)
    granted = (ticket.handoff_id, ticket.epoch, ticket.kv_url)
    if granted != (handoff.handoff_id, handoff.epoch, handoff.kv_url):
        raise Unauthorized("the KV ticket is for another hand-off or URL")
    return ticket


def _encode(raw: bytes) -> str:
    return binascii.b2a_base64(raw, newline=False).translate(_TO_URL_SAFE, b"=").decode()


def _decode(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text.encode().translate(_FROM_URL_SAFE) + b"=" * (-len(text) % 4))
    except binascii.Error as exc:
        raise Unauthorized("the KV ticket is malformed") from exc
