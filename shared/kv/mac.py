"""HMAC-SHA256 under the shared secret, in domains: what is signed for one use means nothing to another."""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache

MAC_BYTES = hashlib.sha256().digest_size


def mac(secret: bytes, domain: bytes, content: bytes | bytearray) -> bytes:
    """MAC_BYTES. Raises ValueError for an empty secret."""
    begun = _begun(secret, domain).copy()
    begun.update(content)
    return begun.digest()


@lru_cache(maxsize=8)
def _begun(secret: bytes, domain: bytes) -> hmac.HMAC:
    """Keyed and fed the domain, which is half of the work. Kept, as a process has one secret and few domains."""
    if not secret:
        raise ValueError("the shared secret is empty")
    return hmac.new(secret, domain, hashlib.sha256)
