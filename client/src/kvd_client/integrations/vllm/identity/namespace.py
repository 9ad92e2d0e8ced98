"""Who this engine is to kvd, and all that must agree before it may share bytes.

vLLM's block hash covers the tokens and what requests bring along. All else that decides what
lies in a block is gathered here. What can't be known makes the namespace this start's own.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from kvd_client.draft import wire_text
from kvd_client.identity import EngineIdentity, Group, NamespaceFields
from kvd_client.integrations.digests import digest_of
from kvd_client.integrations.vllm.identity.kv_layout import KvLayout, describe_rank, sees_layers
from kvd_client.integrations.vllm.identity.model import config_digest, scales_file
from kvd_client.integrations.vllm.metadata import RankHandshake
from kvd_client.integrations.vllm.options import KvdOptions
from kvd_client.integrations.weights import changed_files, name_weights, short_model_name
from kvd_proto import layout
from kvd_proto.groups import GroupKind
from kvd_proto.limits import MAX_RANKS

log = logging.getLogger(__name__)

SECRET_SEED_ALGORITHMS = frozenset({"xxhash", "xxhash_cbor"})  # vLLM draws one at each start
HASH_SEED_VARIABLE = "PYTHONHASHSEED"
DEFAULT_HASH_SEED = "vllm-none-hash"
PARTITION_VARIABLE = "VLLM_PP_LAYER_PARTITION"
TIME_DIGITS = 19  # of the nanoseconds since 1970, till 2286
# What an adapter does beside what is in it: to which layers, to images, in which order.
LORA_SETTINGS = ("enable_moe_shared_loras", "enable_tower_connector_lora", "target_modules")
POOLING_TYPES = ("seq_pooling_type", "tok_pooling_type")  # of vLLM's pooler
NO_HANDSHAKE = (
    "not every rank has told its layout; under MultiConnector name KvdConnector first, because"
    " vLLM hands on what the first of them tells"
)


def build_namespace(
    vllm_config: Any,
    kv_cache_config: Any,
    offloading_config: Any,
    options: KvdOptions,
    handshakes: Sequence[RankHandshake],
) -> NamespaceFields:
    """The namespace of this engine's blocks; the same for every engine that may share them.

    Replicas of a data-parallel engine come to the same one. `handshakes` should have one of each
    rank; else the layout is what this process knows of it.
    """
    doubts = [*_doubts(vllm_config, options)]
    weights, doubt = _weights(vllm_config, options)
    doubts += [doubt] if doubt else []
    if len(handshakes) != offloading_config.parallel.world_size:
        handshakes = ()
        if not sees_layers(vllm_config, kv_cache_config):
            doubts.append(NO_HANDSHAKE)
    if doubts and not options.unshared:
        log.warning("kvd: this engine shares no blocks, nor with its next start: %s", doubts)
    cache = vllm_config.cache_config
    parts = _rank_layout(vllm_config, kv_cache_config, handshakes)
    specs = digest_of([[g.layer_names, g.kv_cache_spec] for g in _groups(kv_cache_config)])
    return NamespaceFields(
        tenant=options.tenant,
        account=options.account,
        model=wire_text(short_model_name(vllm_config.model_config.model)),
        model_config_digest=config_digest(vllm_config),
        weights_id=wire_text(weights),
        quantization=wire_text(str(vllm_config.model_config.quantization or "")),
        kv_dtype=wire_text(_kv_dtype(vllm_config, offloading_config)),
        kv_scale_source=_kv_scale_source(cache),
        attention_backend=wire_text(f"{parts.backends} vllm-{_vllm_release()}"),
        kv_layout=wire_text(f"{parts.layout};{parts.processor};{specs}"),
        parallel_shape=wire_text(_parallel_shape(vllm_config.parallel_config, offloading_config)),
        lora_digest=wire_text(_lora(vllm_config, options)),
        hash_algorithm=_hash_algorithm(cache, offloading_config),
        hash_bytes=_hash_bytes(cache.prefix_caching_hash_algo),
        groups=tuple(_describe_groups(kv_cache_config, offloading_config, handshakes)),
        unshared=bool(doubts) or options.unshared,
    )


def check_config(vllm_config: Any) -> None:
    """Raise ValueError for a configuration that can't work with kvd; it says what to change."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    KvdOptions.from_extra_config(transfer.kv_connector_extra_config)
    check_transfer(transfer)
    if parallel.nnodes > 1 and parallel.nnodes_within_dp > 1:
        raise ValueError(
            f"one engine's ranks lie on {parallel.nnodes_within_dp} nodes, and kvd serves one."
            " Keep tensor and pipeline parallelism within a node (data parallelism may cross)"
        )
    if parallel.world_size > MAX_RANKS:
        raise ValueError(f"{parallel.world_size} ranks, kvd allows {MAX_RANKS} an engine")
    _check_pooling(vllm_config.model_config)
    _check_prompt_only(vllm_config)
    try:
        layout.require_ordered_stores()
    except RuntimeError as error:
        raise ValueError(f"{error}: run the engine on such a machine, or without kvd") from error


def check_transfer(transfer: Any) -> None:
    """Raise ValueError for what vLLM's own side reads and kvd can't work with.

    Under MultiConnector vLLM reads the outer configuration, and this connector is given its own
    part: both must be right.
    """
    if transfer.kv_load_failure_policy != "recompute":
        raise ValueError(
            f'kv_load_failure_policy is "{transfer.kv_load_failure_policy}": a request would fail'
            ' whenever the daemon is away. Set "kv_load_failure_policy":"recompute" in'
            " --kv-transfer-config (under MultiConnector there and in this connector's own part)"
        )
    if not transfer.is_kv_consumer:
        raise ValueError(
            f'kv_role is "{transfer.kv_role}": vLLM would not keep blocks from being used again'
            ' under a load. Set "kv_role":"kv_both" in --kv-transfer-config (under MultiConnector'
            " there and in this connector's own part)"
        )


def _check_pooling(model_config: Any) -> None:
    """Raise ValueError for a model that pools over tokens which a hit would leave out.

    VLLM turns its own prefix cache off for these and asks a connector all the same. By MEAN a hit
    then ends the engine.
    """
    pooler = model_config.pooler_config
    if pooler is not None and not model_config.is_prefix_caching_supported:
        kinds = (getattr(pooler, name, None) for name in POOLING_TYPES)
        named = "/".join(str(kind) for kind in kinds if kind)
        raise ValueError(
            f"this model's pooling ({named or 'all tokens'}) needs each token of a prompt computed"
            " anew, so nothing that kvd has could be loaded. Leave --kv-transfer-config out"
        )


def _check_prompt_only(vllm_config: Any) -> None:
    """Raise ValueError where generated tokens attend to less than the same tokens of a prompt do.

    So it is with reference sliding windows (R-SWA). VLLM turns its own prefix cache off for these.
    """
    extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
    window = getattr(vllm_config.model_config, "rswa_window", None)
    if window is not None and not extra_config.get("offload_prompt_only", True):
        raise ValueError(
            f"this model's generated tokens attend to {window} of their own (R-SWA), and as part of"
            " another prompt to all: their KV would be wrong there. Leave offload_prompt_only out"
            " of kv_connector_extra_config, so that prompts alone are stored"
        )


def engine_identity(vllm_config: Any) -> EngineIdentity:
    """The same in all processes of one start of one engine, and in no other.

    Found from the configuration that vLLM hands to each process. Data-parallel replicas are
    engines of their own.
    """
    transfer = vllm_config.kv_transfer_config
    options = KvdOptions.from_extra_config(transfer.kv_connector_extra_config)
    replica = _replica(vllm_config.parallel_config)
    engine_id = options.engine_name or str(transfer.engine_id)
    if vllm_config.parallel_config.data_parallel_size > 1 or replica:
        engine_id += f"-dp{replica}"
    start = (transfer.engine_id, vllm_config.instance_id, replica)
    nonce = hashlib.blake2b(repr(start).encode(), digest_size=16).digest()
    return EngineIdentity(wire_text(engine_id), nonce)


def shard_bytes_of(kv_cache_config: Any, offloading_config: Any) -> tuple[tuple[int, ...], ...]:
    """Bytes of one engine block in each shard, for each offloaded group, by vLLM's figures.

    All ranks are taken to hold as much as this one: under pipeline parallelism only their
    handshakes tell.
    """
    shards = 1 if offloading_config.replicated_layout else offloading_config.parallel.world_size
    sizes = []
    for group in offloading_config.groups:
        spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        by_layer = getattr(spec, "kv_cache_specs", {})
        layers = [by_layer.get(name, spec) for name in group.layer_names]
        sizes.append((sum(_block_bytes(layer) for layer in layers),) * shards)
    return tuple(sizes)


def _block_bytes(spec: Any) -> int:
    """Bytes of one layer's part of a block, without what pads it."""
    unpadded = getattr(spec, "unpadded_page_size_bytes", None)
    if unpadded is None:
        unpadded = getattr(spec, "real_page_size_bytes", spec.page_size_bytes)
    return int(unpadded)


# -- fields -----------------------------------------------------------------------------------


def _doubts(vllm_config: Any, options: KvdOptions) -> Iterator[str]:
    """What can't be known of this engine, apart from its weights."""
    cache = vllm_config.cache_config
    algorithm = cache.prefix_caching_hash_algo
    if algorithm in SECRET_SEED_ALGORITHMS and os.environ.get(HASH_SEED_VARIABLE) is None:
        yield f"{algorithm} hashes with a random seed; set {HASH_SEED_VARIABLE}, or use sha256"
    if vllm_config.weight_transfer_config is not None:
        # Of an update itself vLLM tells the connector nothing: other weights, the same name.
        yield "weight transfer is configured, so the weights may change as the engine runs"
    if _numbers_inputs(vllm_config):
        yield (
            "with neither a prefix cache nor a cache of processed inputs vLLM numbers images, the"
            " same way at each start; start it with one of them"
        )
    scales = scales_file(vllm_config.model_config)
    begun_ns = _begun_ns(vllm_config) if scales else None
    if scales and begun_ns and (change := changed_files([scales], begun_ns)):
        yield change
    if vllm_config.lora_config is not None and not options.lora_id:
        yield "vLLM's hash has an adapter's name, not what is in it; set lora_id"


def _numbers_inputs(vllm_config: Any) -> bool:
    """Whether block hashes have numbers in place of digests of images and the like.

    VLLM saves itself the digests where it has no cache of its own that would need them.
    """
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    if multimodal is None or vllm_config.cache_config.enable_prefix_caching:
        return False
    return not getattr(multimodal, "mm_processor_cache_gb", 1)


def _weights(vllm_config: Any, options: KvdOptions) -> tuple[str, str]:
    """What model and drafter are called, and why that can't be known."""
    if options.weights_id:
        return f"named:{options.weights_id}", ""
    target = vllm_config.model_config
    models = [(target, vllm_config.load_config)]
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and getattr(draft, "model", target.model) != target.model:
        own = getattr(speculative, "draft_load_config", None)
        models.append((draft, own or vllm_config.load_config))
    begun_ns = _begun_ns(vllm_config)
    found = [name_weights(model, load, begun_ns) for model, load in models]
    problem = next((weights.problem for weights in found if weights.problem), "")
    return " ".join(weights.name for weights in found), problem and f"{problem}; set weights_id"


def _begun_ns(vllm_config: Any) -> int | None:
    """When vLLM made its configuration, after which it loads weights: it calls itself by that."""
    number = str(vllm_config.instance_id).split("_", maxsplit=1)[0]
    return int(number) if number.isdecimal() and len(number) >= TIME_DIGITS else None


def _kv_dtype(vllm_config: Any, offloading_config: Any) -> str:
    """What is stored, what it was computed in, and which layers are left out of that."""
    cache = vllm_config.cache_config
    stored = str(offloading_config.model.dtype)
    computed = str(vllm_config.model_config.dtype).removeprefix("torch.")
    parts = [stored] if stored == computed else [f"{stored} of {computed}"]
    skipped = getattr(cache, "kv_cache_dtype_skip_layers", None)
    parts += [f"without {','.join(sorted(skipped))}"] if skipped else []
    return " ".join(parts)


def _kv_scale_source(cache_config: Any) -> str:
    """Where the scales of quantised KV come from."""
    if "per_token_head" in str(cache_config.cache_dtype):
        return "block"  # stored beside the values
    quantised = str(cache_config.cache_dtype) not in ("auto", "float16", "bfloat16")
    return "checkpoint" if quantised else ""


def _rank_layout(
    vllm_config: Any, kv_cache_config: Any, handshakes: Sequence[RankHandshake]
) -> KvLayout:
    """The ranks' layout; where they differ, every rank's."""
    if not handshakes:
        return describe_rank(vllm_config, kv_cache_config)
    ranks = sorted(handshakes, key=lambda rank: rank.rank)
    columns = zip(*(KvLayout.parse(rank.kv_layout) for rank in ranks), strict=True)
    return KvLayout(*(_joined(column) for column in columns))


def _joined(column: Sequence[str]) -> str:
    return column[0] if len(set(column)) == 1 else "|".join(column)


def _parallel_shape(parallel: Any, offloading_config: Any) -> str:
    """Which rank has which heads, layers and tokens. Replicas (dp) all have the same."""
    sizes = offloading_config.parallel
    shape = f"tp{sizes.tp_size}-pp{sizes.pp_size}-pcp{sizes.pcp_size}-dcp{sizes.dcp_size}"
    if sizes.pcp_size * sizes.dcp_size > 1:
        shape += f"-interleave{parallel.cp_kv_cache_interleave_size}"
    partition = os.environ.get(PARTITION_VARIABLE)
    if sizes.pp_size > 1 and partition:
        shape += f"-layers{partition}"
    return shape + ("-replicated" if offloading_config.replicated_layout else "")


def _lora(vllm_config: Any, options: KvdOptions) -> str:
    lora = vllm_config.lora_config
    if lora is None:
        return ""
    dtype = str(lora.lora_dtype).removeprefix("torch.")
    parts = [options.lora_id or "contents not known", dtype]
    for setting in LORA_SETTINGS:
        value = getattr(lora, setting, None)
        parts += [f"{setting}={_in_order(value)}"] if value else []
    return " ".join(parts)


def _in_order(value: Any) -> str:
    return ",".join(sorted(value)) if isinstance(value, list) else str(value)


def _hash_algorithm(cache_config: Any, offloading_config: Any) -> str:
    """With the seed, which is not told in clear, and the tokens of one hash."""
    seed = os.environ.get(HASH_SEED_VARIABLE, DEFAULT_HASH_SEED)
    digest = hashlib.blake2b(seed.encode(), digest_size=8).hexdigest()
    tokens = offloading_config.cache.tokens_per_hash
    return f"{cache_config.prefix_caching_hash_algo} seed {digest} tokens {tokens}"


def _hash_bytes(algorithm: str) -> int:
    from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415 - vllm is imported late

    return len(get_hash_fn_by_name(algorithm)("any"))


def _vllm_release() -> str:
    """Releases may lay blocks out in another way, or compute another thing; patches don't."""
    from vllm import __version__  # noqa: PLC0415 - importing vllm takes its time

    release = str(__version__)
    numbers = release.split("+", maxsplit=1)[0].split(".")
    return ".".join(numbers[:2]) if all(n.isdigit() for n in numbers) else release


# -- groups -----------------------------------------------------------------------------------


def _groups(kv_cache_config: Any) -> Sequence[Any]:
    groups: Sequence[Any] = kv_cache_config.kv_cache_groups
    return groups


def _describe_groups(
    kv_cache_config: Any, offloading_config: Any, handshakes: Sequence[RankHandshake]
) -> Iterator[Group]:
    blocks_per_block = offloading_config.cache.blocks_per_chunk
    shard_bytes = _shard_bytes(handshakes) or shard_bytes_of(kv_cache_config, offloading_config)
    for group, sizes in zip(offloading_config.groups, shard_bytes, strict=True):
        vllm_group = kv_cache_config.kv_cache_groups[group.group_id]
        kind, window = _kind(vllm_group.kv_cache_spec)
        if kind is GroupKind.RECURRENT_STATE and blocks_per_block > 1:
            _check_last_states(vllm_group.kv_cache_spec)
        yield Group(
            tokens_per_block=group.tokens_per_block * blocks_per_block,
            shard_bytes=sizes,
            kind=kind,
            blocks_per_block=blocks_per_block,
            sliding_window_tokens=window,
            drafter=bool(vllm_group.is_eagle_group),
        )


def _check_last_states(spec: Any) -> None:
    """Raise ValueError where a hit may end on a state that is not the last of its block."""
    mode = getattr(_any_layer(spec), "mamba_cache_mode", "")
    if mode != "align":
        raise ValueError(
            f'blocks_per_chunk is above 1, and with mamba_cache_mode "{mode}" a hit may end on'
            " any engine block, of which kvd keeps only the last: leave blocks_per_chunk out of"
            " kv_connector_extra_config, or start vLLM with --mamba-cache-mode align"
        )


def _any_layer(spec: Any) -> Any:
    """One layer's part of a group whose layers are all of one kind."""
    return next(iter(getattr(spec, "kv_cache_specs", {0: spec}).values()))


def _shard_bytes(handshakes: Sequence[RankHandshake]) -> tuple[tuple[int, ...], ...]:
    """Bytes of one engine block by group and shard, as the ranks have registered them.

    Raises ValueError where ranks of one shard don't agree, or a shard has no rank.
    """
    by_shard: dict[int, tuple[int, ...]] = {}
    for rank in handshakes:
        known = by_shard.setdefault(rank.shard, rank.shard_bytes)
        if known != rank.shard_bytes:
            raise ValueError(f"rank {rank.rank}: blocks of shard {rank.shard} have other sizes")
    if sorted(by_shard) != list(range(len(by_shard))):
        raise ValueError(f"ranks hold shards {sorted(by_shard)}: some shard has no rank")
    return tuple(zip(*(by_shard[shard] for shard in sorted(by_shard)), strict=True))


def _kind(spec: Any) -> tuple[GroupKind, int]:
    """The group's kind, and how many tokens a hit needs at its end (0: all of them).

    Attention within fixed stretches of tokens reads at most one stretch back, so a window of
    that size has all that it may need.
    """
    from vllm.v1 import kv_cache_interface as kinds  # noqa: PLC0415 - vllm is imported late

    one = _any_layer(spec)
    if isinstance(one, kinds.MambaSpec):
        return GroupKind.RECURRENT_STATE, 0
    if isinstance(one, kinds.SlidingWindowSpec):
        retained = getattr(one, "extra_retained_tokens", 0)
        return GroupKind.SLIDING_WINDOW, one.sliding_window + max(retained - 1, 0)
    if isinstance(one, kinds.ChunkedLocalAttentionSpec):
        return GroupKind.SLIDING_WINDOW, one.attention_chunk_size
    if isinstance(one, kinds.FullAttentionSpec):
        return GroupKind.FULL_ATTENTION, 0
    raise ValueError(f"kvd does not know how {type(one).__name__} is cached")


def _replica(parallel: Any) -> int:
    return int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))
