"""Guides say of each block of commands whether it is run; tests/guides runs those that are."""

from __future__ import annotations

from tests.guides.blocks import Block, blocks_of, every_block


def test_every_block_of_commands_says_whether_it_is_run() -> None:
    """A line above it: `<!-- run -->`, or `<!-- not run: WHY -->`."""
    blocks = every_block()
    assert len(blocks) > 20
    assert [f"{block.name}: {block.mark}" for block in blocks if not block.is_marked] == []


def test_a_block_without_a_mark_is_found() -> None:
    text = "# A guide\n\n```\nrm -r /\n```\n\n<!-- run -->\n```sh\ntrue\n```\n```toml\na = 1\n```\n"
    bare, marked = blocks_of("guide.md", text)
    assert (bare.is_marked, bare.is_run, bare.name) == (False, False, "guide.md:3")
    assert (marked.is_marked, marked.is_run, marked.text) == (True, True, "true\n")
    for mark in ("<!-- not run: -->", "<!-- not run: no -->", "<!-- later -->", "<!--run-->"):
        assert not Block("g", 1, mark, "").is_marked
    assert Block("g", 1, "<!-- not run: needs a GPU -->", "").is_marked
