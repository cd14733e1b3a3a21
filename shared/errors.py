"""The exception tree of every process, and the one table that gives each class its place on the wire.

Raised anywhere, answered in one place (`shared.asgi`), carried between processes as `shared.wire.ErrorBody`.
Foreign errors (httpx, safetensors, torch, ...) are converted once, at the boundary that owns the library.

    ServingError
    ├── InvalidRequest ─ PromptTooLong
    ├── Unauthorized
    ├── UnknownModel
    ├── NotKept
    ├── TooLarge
    ├── Overloaded ─ Unavailable
    ├── HandoffError ─ ManifestMismatch, ReservationGone, DigestMismatch
    ├── BackendError ─ BackendTimeout, TransportFailed
    ├── DeadlineExceeded
    └── EngineFault
"""

from __future__ import annotations


class InvariantBroken(RuntimeError):
    """Our own bookkeeping is wrong. Outside the tree on purpose: nothing may answer it as a user error."""


class ServingError(Exception):
    """An outcome that a caller can be told about.

    message: one sentence for the caller; no inner addresses, no stack trace.
    param: the request field at fault, if one is.
    retry_after_s: when another try makes sense; None if unknown.
    """

    code = "internal_error"
    http_status = 500
    retryable = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(ServingError):
    """The caller sent something that can never succeed."""

    code = "invalid_request"
    http_status = 400


class PromptTooLong(InvalidRequest):
    """Prompt plus answer do not fit the context. Clients search the text for "maximum context length"."""

    code = "context_length_exceeded"


class Unauthorized(ServingError):
    """The caller's key or ticket is missing or wrong."""

    code = "invalid_api_key"
    http_status = 401


class UnknownModel(ServingError):
    """The named model is not served here."""

    code = "model_not_found"
    http_status = 404


class NotKept(ServingError):
    """The hand-off that was asked for is not kept here."""

    code = "not_kept"
    http_status = 404


class TooLarge(ServingError):
    """A body is longer than its limit."""

    code = "request_too_large"
    http_status = 413


class Overloaded(ServingError):
    """No room now; the same request can succeed later or elsewhere."""

    code = "overloaded"
    http_status = 429
    retryable = True


class Unavailable(Overloaded):
    """No worker can take it: none is ready, or this one is draining."""

    code = "unavailable"
    http_status = 503


class HandoffError(ServingError):
    """A hand-off of KV between the two sides failed a check. Nothing was decoded from it."""

    code = "handoff_failed"
    http_status = 409
    retryable = True


class ManifestMismatch(HandoffError):
    """The KV is not what was reserved: other model, tokens, shapes, dtype or layout."""

    code = "manifest_mismatch"


class ReservationGone(HandoffError):
    """The reservation is cancelled, expired, finished, or from before a restart. Nothing was written."""

    code = "reservation_gone"
    http_status = 410


class DigestMismatch(HandoffError):
    """KV bytes were damaged on the way."""

    code = "digest_mismatch"
    http_status = 422


class BackendError(ServingError):
    """A worker answered wrongly, or its connection broke."""

    code = "backend_error"
    http_status = 502
    retryable = True


class BackendTimeout(BackendError):
    """A worker did not answer in its stage's time."""

    code = "backend_timeout"
    http_status = 504


class TransportFailed(BackendError):
    """KV cannot go this way between these two workers, though they talk to each other; another way may do."""

    code = "transport_failed"


class DeadlineExceeded(ServingError):
    """The request's own deadline passed; whatever was left of it is dropped."""

    code = "deadline_exceeded"
    http_status = 504


class EngineFault(ServingError):
    """The engine failed while it served this request. The process reports itself unhealthy."""

    code = "engine_fault"
    http_status = 500
    retryable = True


def error_table() -> dict[str, type[ServingError]]:
    """Every code on the wire and the class it means, made from the tree so that the two cannot drift."""
    table: dict[str, type[ServingError]] = {}
    stack: list[type[ServingError]] = [ServingError]
    while stack:
        cls = stack.pop()
        if cls.code in table:
            raise InvariantBroken(f"{cls.__name__} and {table[cls.code].__name__} share a code")
        table[cls.code] = cls
        stack.extend(cls.__subclasses__())
    return table
