"""Settings of the router process, read from HANDOFF_* once at the start; the settings table is made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode

from shared.settings import CommonSettings


def _split(value: object) -> object:
    """Comma separated text to its parts; anything else is left to pydantic."""
    return (
        tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value
    )


def _worker_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Without trailing slashes and repetitions; only plain http or https addresses."""
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError("a worker address must start with http:// or https://")
    return tuple(dict.fromkeys(url.rstrip("/") for url in urls))


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Urls = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_worker_urls)]


class RouterSettings(CommonSettings):
    """Frozen. Every time-out has its stage; nothing in the router waits without one."""

    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    api_key: SecretStr | None = Field(
        None, description="Key that clients must send as a bearer; with none at all the API is open."
    )
    api_key_file: Path | None = Field(None, description="File with further keys, one a line.")
    prefill_urls: Urls = Field((), description="Prefill workers, comma separated; none means unified mode.")
    decode_urls: Urls = Field(("http://127.0.0.1:8002",), description="Decode workers, comma separated.")
    served_model_name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Name that clients use; empty means the checkpoint's own.",
    )

    request_timeout_s: float = Field(
        600.0, gt=0, le=86_400, description="Longest life of a request in seconds."
    )
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        description="Answer length when the client names none; empty: what fits for chat, 16 for completions.",
    )
    max_inflight: int = Field(
        512, ge=1, le=100_000, description="Prompts served at once; more are answered 429."
    )
    max_body_bytes: int = Field(
        4 * 2**20, ge=1024, description="Longest request body in bytes; longer ones are answered 413."
    )
    body_timeout_s: float = Field(
        60.0, gt=0, le=3600, description="Seconds within which a request body must have arrived."
    )
    cors_origins: Names = Field(
        (), description="Origins whose pages may use the API, comma separated; none means no CORS."
    )
    offload_chars: int = Field(
        4096,
        ge=0,
        description="Requests, and logprobs of answers, longer than this many characters are left to a thread.",
    )

    text_threads: int = Field(
        2,
        ge=1,
        le=64,
        description="Threads for such requests; as many more for those 16 times as long, and for answers.",
    )
    max_text_queued: int = Field(
        64,
        ge=0,
        le=100_000,
        description="Requests of each of these kinds that may wait; more are answered 429.",
    )

    health_interval_s: float = Field(2.0, gt=0, le=300, description="Seconds between two looks at a worker.")
    health_timeout_s: float = Field(
        2.0, gt=0, le=60, description="Seconds within which a worker must answer a look."
    )
    probe_timeout_s: float = Field(
        60.0, gt=0, le=600, description="Seconds within which a pair must answer the readiness probe."
    )

    connect_timeout_s: float = Field(2.0, gt=0, le=60, description="Seconds to connect to a worker.")
    write_timeout_s: float = Field(
        30.0, gt=0, le=600, description="Seconds that one write to a worker may block."
    )
    reserve_timeout_s: float = Field(
        60.0,
        gt=0,
        le=600,
        description="Seconds from asking a decode worker to its grant or refusal; it may queue for blocks.",
    )
    prefill_timeout_s: float = Field(
        300.0, gt=0, le=86_400, description="Seconds from asking for prefill to the first token."
    )
    transfer_timeout_s: float = Field(
        60.0, gt=0, le=86_400, description="Seconds from the first token to the hand-off's end."
    )
    decode_timeout_s: float = Field(
        60.0, gt=0, le=86_400, description="Longest silence of a decode worker between two tokens."
    )

    max_tries: int = Field(
        3, ge=1, le=20, description="Tries of a request over all workers, the first one included."
    )
    recovery_wait_s: float = Field(
        5.0,
        ge=0,
        le=600,
        description="Seconds that a broken request waits for a worker to come back when none is left.",
    )
    retry_after_s: float = Field(
        1.0, ge=0, le=600, description="Retry-After when the router itself refuses a request."
    )
