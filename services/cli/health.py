"""`handoff health URL`: one GET for container health checks, so that an image needs no curl."""

from __future__ import annotations

import httpx


async def answers(client: httpx.AsyncClient, url: str) -> bool:
    """Whether `url` answers with 2xx now. No connection, a time-out or another status is a plain no."""
    try:
        return (await client.get(url)).is_success
    except httpx.HTTPError:
        return False


def check(url: str, timeout_s: float) -> str | None:
    """None if `url` answers with 2xx within `timeout_s`, else the reason in one line."""
    try:
        # A proxy from the environment must never stand between a check and the process that is checked.
        with httpx.Client(timeout=timeout_s, trust_env=False) as client:
            response = client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        return f"{url}: {str(exc) or type(exc).__name__}"
    return (
        None if response.is_success else f"{url}: HTTP {response.status_code} {response.text[:200]}".strip()
    )
