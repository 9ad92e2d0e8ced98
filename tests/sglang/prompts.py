"""Prompts by number, and SGLang's keys of their pages."""

from __future__ import annotations

from sglang.srt.mem_cache.utils import get_storage_hash_str

from tests.sglang.rig import PAGE_TOKENS

PAGES = 24


def prompt(number: int, pages: int = PAGES) -> list[int]:
    return [number * 100_000 + place for place in range(pages * PAGE_TOKENS)]


def keys(number: int, pages: int = PAGES) -> list[str]:
    made: list[str] = get_storage_hash_str(prompt(number, pages), None, page_size=PAGE_TOKENS)
    return made
