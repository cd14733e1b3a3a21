"""HTTP for tests: httpx without reading proxies or certificates, which would cost more than most requests."""

from __future__ import annotations

from typing import Any

import httpx


def get(url: str, **options: Any) -> httpx.Response:
    """httpx.get."""
    return httpx.get(url, **_plain(options))


def post(url: str, **options: Any) -> httpx.Response:
    """httpx.post."""
    return httpx.post(url, **_plain(options))


def stream(method: str, url: str, **options: Any) -> Any:
    """httpx.stream."""
    return httpx.stream(method, url, **_plain(options))


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {"verify": False, "trust_env": False, "timeout": 60} | options
