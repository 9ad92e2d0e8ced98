"""`kvd size`: how large a pool should be, for a model, or for what a running daemon has seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from kvd.cli.exits import EXIT_MISUSED, Failure
from kvd.cli.options import Checked, FilePath, daemon_options
from kvd.cli.printing import show_json, size, table
from kvd.config.settings import SETTINGS
from kvd.config.values import parse_size, whole_number
from kvd.core.blocks.extent_fit import part_fits
from kvd.core.model.size_class import MIN_SLOT_BYTES
from kvd.pool.config import (
    COMFORTABLE_EXTENTS,
    LEAST_CHOSEN_BYTES,
    MOST_CHOSEN_BYTES,
    chosen_extent_bytes,
)

DTYPE_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1,
}  # fmt: skip
LEASE_SHARE: float = next(each.default for each in SETTINGS if each.name == "lease_share")
TABLES_SHARE = 28  # one part in so many beside the blocks
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_KEPT = frozenset({"full_attention", "sliding_attention", "attention", "chunked_attention"})
MAX_TOKEN_NUMBERS = 1 << 40  # of a token
_TOKENS = Checked(whole_number(1, 1 << 50), "count")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What one token of a model takes in the pool, all ranks together."""

    attention: str  # MHA, GQA, MQA or MLA
    layers: int
    layers_without_kv: int  # recurrent ones: their state is not counted here
    token_bytes: int
    shards: int  # ranks that keep bytes of their own


def model_size(config: dict[str, Any], dtype: str, ranks: int = 1) -> ModelSize:
    """From a model's config.json. ValueError names the field that is missing."""
    config = {**config, **_text_config(config)}
    kinds = config.get("layer_types")
    layers = _field(config, *_LAYERS)
    kept = sum(str(kind) in _KEPT for kind in kinds) if isinstance(kinds, list) else layers
    if config.get("kv_lora_rank"):
        width = int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim") or 0)
        name, numbers = "MLA", width  # one vector, the same for every rank: stored once
    else:
        heads = _field(config, *_HEADS)
        kv_heads = int(config.get("num_key_value_heads") or config.get("num_kv_heads") or 0)
        if not kv_heads:
            kv_heads = 1 if config.get("multi_query") else heads
        head = int(config.get("head_dim") or 0) or _field(config, *_WIDTHS) // heads
        name = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
        numbers = 2 * max(kv_heads, ranks) * head  # a head is kept by each rank that needs it
        numbers = 0 if kv_heads < 0 else numbers
    if kept < 1 or numbers < 1:
        raise ValueError("by its layers, heads and widths it keeps no KV")
    if kept * numbers > MAX_TOKEN_NUMBERS:
        raise ValueError("by its layers, heads and widths a token takes more than any model's")
    token_bytes = kept * numbers * DTYPE_BYTES[dtype]
    return ModelSize(name, kept, layers - kept, token_bytes, 1 if name == "MLA" else ranks)


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """What a model of several kinds says of its text; many say null."""
    found = config.get("text_config")
    return found if isinstance(found, dict) else {}


def _field(config: dict[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise ValueError(f"it has none of {', '.join(names)}")


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text())
    except OSError as error:
        said = f"{file} can't be read: {error.strerror}"
        if isinstance(error, FileNotFoundError):  # a name on the hub, as engines take
            said += "; MODEL is a config.json on this machine, or the folder that has it"
        raise Failure(said, EXIT_MISUSED) from None
    except (ValueError, RecursionError) as error:
        raise Failure(f"{file} is no JSON: {error}", EXIT_MISUSED) from None
    if not isinstance(found, dict):
        raise Failure(f"{file} is no JSON object", EXIT_MISUSED)
    return found


def _dtype(config: dict[str, Any], chosen: str | None) -> str:
    inner = _text_config(config)
    named = inner.get("torch_dtype") or inner.get("dtype")
    dtype = chosen or config.get("torch_dtype") or config.get("dtype") or named or "bfloat16"
    if str(dtype) not in DTYPE_BYTES:
        raise Failure(f"--kv-dtype is wanted: {dtype!r} is not known", EXIT_MISUSED)
    return str(dtype)


def _bytes(text: str) -> int:
    pool_bytes = parse_size(text, None)
    if pool_bytes < LEAST_CHOSEN_BYTES:
        raise ValueError(f"{LEAST_CHOSEN_BYTES >> 20}MiB, one extent, or more")
    return pool_bytes


@click.command("size")
@click.argument("model", required=False, type=FilePath())
@click.option("--tokens", type=_TOKENS, metavar="N", help="How many tokens the pool shall hold.")
@click.option(
    "--pool-bytes",
    type=Checked(_bytes, "size"),
    metavar="SIZE",
    help="Tell how many tokens a pool of this size holds.",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(sorted(DTYPE_BYTES)),
    help="Type of the KV (default: the model's own).",
)
@click.option(
    "--block-tokens",
    type=Checked(whole_number(1, 65536), "count"),
    default=16,
    metavar="N",
    help="Tokens of a block (default 16).",
)
@click.option(
    "--ranks",
    type=Checked(whole_number(1, 256), "count"),
    default=1,
    metavar="N",
    help="Ranks of tensor parallelism (default 1).",
)
@daemon_options
def command(**flags: Any) -> int:
    """Tell how large a pool should be.

    With MODEL, a model's config.json or its folder: bytes of a token, and the pool for so many
    tokens. Without: how much more a running daemon would find with a larger pool, by a sample of
    what its engines used.
    """
    given = SimpleNamespace(**flags)
    if given.model is None:
        for flag, value in (("--tokens", given.tokens), ("--pool-bytes", given.pool_bytes)):
            if value is not None:
                raise click.UsageError(f"{flag} needs MODEL: a config.json, or its folder")
        return _of_daemon(given)
    config = _read(given.model)
    dtype = _dtype(config, given.kv_dtype)
    try:
        found = model_size(config, dtype, given.ranks)
    except (TypeError, ValueError, OverflowError) as error:
        raise Failure(f"{given.model} can't be sized: {error}", EXIT_MISUSED) from None
    said = {
        **asdict(found),
        "kv_dtype": dtype,
        "block_bytes": found.token_bytes * given.block_tokens,
    }
    said |= _pool(given, int(said["block_bytes"]), found.shards)
    if given.json:
        show_json(said)
    else:
        click.echo("\n".join(_lines(said, given)))
    return 0


def blocks_in(pool_bytes: int, block_bytes: int, shards: int) -> int:
    """How many a new pool of this size holds: a part of a block lies in one extent."""
    extent_bytes = chosen_extent_bytes(pool_bytes)
    slots = extent_bytes // _part(block_bytes, shards)
    return pool_bytes // extent_bytes // shards * slots


def pool_for(blocks: int, block_bytes: int, shards: int) -> int:
    """The least pool that holds so many, in whole rows of extents that such blocks fit into."""
    part_bytes = _part(block_bytes, shards)
    extent_bytes = LEAST_CHOSEN_BYTES
    while extent_bytes <= MOST_CHOSEN_BYTES:
        if slots := extent_bytes // part_bytes:
            pool_bytes = -(-blocks // slots) * shards * extent_bytes
            if extent_bytes > LEAST_CHOSEN_BYTES:
                pool_bytes = max(pool_bytes, extent_bytes * COMFORTABLE_EXTENTS)
            fits = extent_bytes == MOST_CHOSEN_BYTES or part_fits(part_bytes, extent_bytes)
            if fits and chosen_extent_bytes(pool_bytes) == extent_bytes:
                return pool_bytes
        extent_bytes *= 2
    return blocks * part_bytes * shards  # the daemon names the extents that would do


def _part(block_bytes: int, shards: int) -> int:
    return max(-(-block_bytes // shards), MIN_SLOT_BYTES)


def _pool(given: SimpleNamespace, block_bytes: int, shards: int) -> dict[str, int]:
    said: dict[str, int] = {}
    held = pool_bytes = 0
    if given.tokens:
        blocks = -(-given.tokens // given.block_tokens)
        pool_bytes = pool_for(blocks, block_bytes, shards)
        held = max(blocks, blocks_in(pool_bytes, block_bytes, shards))
        said |= {"tokens": given.tokens, "blocks": blocks, "pool_bytes": pool_bytes}
        said["tmpfs_bytes"] = pool_bytes + pool_bytes // TABLES_SHARE + (64 << 20)
    if given.pool_bytes:
        pool_bytes = given.pool_bytes
        held = blocks_in(pool_bytes, block_bytes, shards)
        said["tokens_in_pool"] = held * given.block_tokens
    if pool_bytes:
        leased = max(int(pool_bytes * LEASE_SHARE) // block_bytes, 1)
        said["longest_prompt_tokens"] = min(leased, held) * given.block_tokens
    return said


def _lines(said: dict[str, Any], given: SimpleNamespace) -> Iterator[str]:
    yield (
        f"{said['attention']}, {said['layers']} layers, {said['kv_dtype']}:"
        f" {size(said['token_bytes'])} a token, {size(said['block_bytes'])} a block of"
        f" {given.block_tokens} tokens"
    )
    if said["layers_without_kv"]:
        yield f"{said['layers_without_kv']} recurrent layers keep a state, which is not counted"
    if "tokens" in said:
        yield (
            f"{said['tokens']} tokens are {said['blocks']} blocks: pool_bytes of"
            f" {-(-said['pool_bytes'] >> 20)}MiB, on a tmpfs of"
            f" {-(-said['tmpfs_bytes'] >> 20)}m ({size(said['tmpfs_bytes'])})"
        )
    if "tokens_in_pool" in said:
        yield f"a pool of {size(given.pool_bytes)} holds {said['tokens_in_pool']} tokens"
    if "longest_prompt_tokens" in said:
        yield (
            f"one request can load {said['longest_prompt_tokens']} tokens of it: a share of"
            f" {LEASE_SHARE:g}, the default of lease_share (docs/sizing.md)"
        )


def _of_daemon(given: SimpleNamespace) -> int:
    from kvd.cli.status import as_json, look  # noqa: PLC0415 - gRPC, only where it is asked

    status = look(given)
    if not status.HasField("curve"):
        raise Failure(
            "the daemon has nothing to go by yet: no engine has used a block since its start (or"
            " this user is no operator)"
        )
    if given.json:
        show_json({"pool_bytes": status.pool.bytes, "curve": as_json(status)["curve"]})
        return 0
    points = [(point.pools, point.hit_ratio) for point in status.curve.points]
    here = dict(points).get(1.0, 0.0)
    rows = [
        (f"{pools:g} x", size(pools * status.pool.bytes), f"{ratio:.1%}", f"{ratio - here:+.1%}")
        for pools, ratio in points
    ]
    click.echo("\n".join(table(("POOL", "SIZE", "HIT RATIO", "DIFFERENCE"), rows, "")))
    click.echo(
        f"estimated from {status.curve.uses} uses of {status.curve.sampled_share:.2%} of the"
        " blocks,"
        " for a pool that evicts what was used longest ago"
    )
    return 0
