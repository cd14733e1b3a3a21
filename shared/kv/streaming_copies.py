"""Large copies that go past the caches: twice as fast, for memory that nobody reads soon.

The GNU C library copies so what is nearly as large as the last cache. How large is one of its tunables (its manual,
"Hardware Capability Tunables"), which a process reads when it starts: so whoever starts a decode worker sets it.
Other C libraries and other processors ignore it.
"""

from __future__ import annotations

from collections.abc import Mapping

NAME = "GLIBC_TUNABLES"
TUNABLE = "glibc.cpu.x86_non_temporal_threshold"
# K or V of a layer in half the tokens of a short prompt. Smaller copies are better off within the caches.
FROM_BYTES = 32 * 1024


def streaming_copies(environ: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a process that receives KV; nothing if it says something of this itself."""
    others = environ.get(NAME, "")
    if TUNABLE in others:
        return {}
    return {NAME: ":".join(filter(None, (others, f"{TUNABLE}={FROM_BYTES}")))}
