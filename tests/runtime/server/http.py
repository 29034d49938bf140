"""httpx without certificates: to load them takes longer than most requests of a test."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import httpx2 as httpx


def get(url: str, **options: Any) -> httpx.Response:
    return httpx.get(url, verify=False, **options)


def post(url: str, **options: Any) -> httpx.Response:
    return httpx.post(url, verify=False, **options)


def delete(url: str, **options: Any) -> httpx.Response:
    return httpx.delete(url, verify=False, **options)


def stream(method: str, url: str, **options: Any) -> AbstractContextManager[httpx.Response]:
    return httpx.stream(method, url, verify=False, **options)
