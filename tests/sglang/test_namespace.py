"""Which engines share pages: none that would read another's bytes wrong, all that may."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.arg_groups.lora_hook import check_lora_server_args
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.runtime_context import (
    ParallelContext,
    RuntimeContext,
    get_parallel,
    publish,
    use_context,
)
from sglang.srt.server_args import ServerArgs

from kvd_client.identity import NamespaceFields
from kvd_client.integrations.digests import LIBRARY_VARIABLES
from kvd_client.integrations.sglang import namespace
from kvd_client.integrations.sglang.options import HiCacheOptions
from kvd_client.integrations.sglang.pools import HostPool
from kvd_client.integrations.weights import name_weights
from tests.sglang.conftest import MakeBackend
from tests.sglang.rig import PAGE_TOKENS, host_pool, mha_device_pool, state_pool, storage_config
from tests.sglang.shaping_settings import GIVEN, VARIABLES

OPTIONS = HiCacheOptions.from_extra_config({"interface_v1": 1})
NAMED_WEIGHTS = HiCacheOptions.from_extra_config({"interface_v1": 1, "weights_id": "v7"})
NamespaceOf = Callable[..., NamespaceFields]


def weights(directory: Path, content: bytes) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").write_bytes(content)
    return str(directory)


@pytest.fixture
def namespace_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NamespaceOf:
    """The namespace of one pool's pages, under these of SGLang's arguments."""
    device_pool = mha_device_pool()
    model = weights(tmp_path / "model", b"the model's")

    def make(
        options: HiCacheOptions = OPTIONS,
        pool: HostPool | None = None,
        *,
        begun_s: float | None = None,
        served_as: str = "a-model",
        **given: Any,
    ) -> NamespaceFields:
        pool = pool or HostPool("kv", host_pool(device_pool))  # an engine that has just begun
        run = f"sglang-run-{begun_s or time.time()}-7"  # as SGLang does at each start
        monkeypatch.setenv(namespace.RUN_VARIABLE, run)
        arguments = SimpleNamespace(
            **{"model_path": model, "revision": None, "model_loader_extra_config": "{}"} | given
        )
        monkeypatch.setattr(namespace, "server_arguments", lambda: arguments)
        place = storage_config({}, model_name=served_as)
        return namespace.build_namespace(place, [pool], options, is_replicated=False)

    return make


def test_arguments_that_are_looked_at_are_sglangs() -> None:
    known = {name for kind in ServerArgs.__mro__ for name in vars(kind).get("__annotations__", {})}
    looked_at = {
        *namespace.SHAPING_ARGUMENTS,
        *namespace.WEIGHTS_ARGUMENTS,
        *namespace.STARTING_ARGUMENTS,
        "weight_cache_mode",
    }
    assert looked_at <= known
    assert set(GIVEN) == set(namespace.SHAPING_ARGUMENTS), "each has a test of its own"


@pytest.mark.parametrize("argument", GIVEN)
def test_engines_that_compute_or_keep_pages_otherwise_share_none(
    namespace_of: NamespaceOf, argument: str
) -> None:
    assert not namespace_of().unshared
    assert namespace_of() == namespace_of()
    assert namespace_of() != namespace_of(**{argument: GIVEN[argument]})


def test_the_name_that_a_model_is_served_under_keeps_nobody_apart(
    namespace_of: NamespaceOf, tmp_path: Path
) -> None:
    assert namespace_of(served_as="assistant") == namespace_of()
    other = weights(tmp_path / "other", b"another's")
    assert namespace_of(model_path=other).model == "other"


def test_variables_that_are_looked_at_stand_here_once_more() -> None:
    counted = {*namespace.SHAPING_VARIABLES, *LIBRARY_VARIABLES}
    assert set(VARIABLES) == counted, "each has a test of its own"


@pytest.mark.parametrize("variable", VARIABLES)
def test_engines_whose_environment_says_otherwise_share_none(
    namespace_of: NamespaceOf, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    before = namespace_of()
    monkeypatch.setenv(variable, "")  # SGLang takes it for one that is not set
    assert namespace_of() == before
    monkeypatch.setenv(variable, "1")
    assert namespace_of() != before


def test_engines_whose_device_tables_have_tokens_and_heads_in_another_order_share_none(
    namespace_of: NamespaceOf,
) -> None:
    """The host pool takes whole pages as they lie on the device: of the same size, permuted."""
    made = []
    for by_heads in (False, True):
        with envs.SGLANG_USE_HND_KVCACHE.override(by_heads):
            made.append(namespace_of(pool=HostPool("kv", host_pool(mha_device_pool()))))
    assert made[0].groups == made[1].groups
    assert made[0] != made[1]


@pytest.mark.parametrize("argument", namespace.WEIGHTS_ARGUMENTS)
def test_weights_beside_the_models_are_named_by_what_is_in_them(
    namespace_of: NamespaceOf, tmp_path: Path, argument: str
) -> None:
    path = weights(tmp_path / "beside", b"some")
    some = namespace_of(**{argument: path})
    assert some != namespace_of()
    assert some == namespace_of(**{argument: path})
    weights(tmp_path / "beside", b"other")
    assert some != namespace_of(**{argument: path})
    assert namespace_of(**{argument: str(tmp_path / "nowhere")}).unshared


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json", "params.json"])
@pytest.mark.parametrize("options", [OPTIONS, NAMED_WEIGHTS], ids=["found out", "named"])
def test_a_model_whose_files_say_otherwise_computes_otherwise(
    namespace_of: NamespaceOf, tmp_path: Path, file: str, options: HiCacheOptions
) -> None:
    """As where `rope_scaling` is written into its config.json."""
    made = [namespace_of(options)]
    for text in ('{"rope_scaling": null}', '{"rope_scaling": {"rope_type": "yarn"}}'):
        (tmp_path / "model" / file).write_text(text)
        made.append(namespace_of(options))
        assert made[-1] == namespace_of(options)
    assert len({each.model_config_digest for each in made}) == len(made)
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.6}')
    assert namespace_of(options) == made[-1]


def test_an_engine_that_is_attached_once_more_goes_on_with_the_files_that_it_read(
    namespace_of: NamespaceOf, tmp_path: Path
) -> None:
    """What lies there now is for its next start."""
    pool = HostPool("kv", host_pool(mha_device_pool()))
    at_start = namespace_of(pool=pool)
    weights(tmp_path / "model", b"the next release's")
    (tmp_path / "model" / "config.json").write_text('{"rope_scaling": {"rope_type": "yarn"}}')
    assert namespace_of(pool=pool) == at_start
    next_start = namespace_of()
    assert next_start.weights_id != at_start.weights_id
    assert next_start.model_config_digest != at_start.model_config_digest


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_files_that_changed_after_the_engine_began_give_it_nothing_to_share(
    namespace_of: NamespaceOf, tmp_path: Path, file: str
) -> None:
    """As where a backend is attached long after the model was loaded."""
    (tmp_path / "model" / "config.json").write_text("{}")
    time.sleep(0.05)  # the times of files are behind the clock's by a tick
    begun_s = time.time()
    assert not namespace_of(begun_s=begun_s).unshared
    time.sleep(0.05)
    (tmp_path / "model" / file).write_text("the next release's")
    assert namespace_of(begun_s=begun_s).unshared
    time.sleep(0.05)
    assert not namespace_of().unshared, "the next start has a name"


def test_settings_that_changed_after_the_engine_began_count_for_named_weights_too(
    namespace_of: NamespaceOf, tmp_path: Path
) -> None:
    time.sleep(0.05)
    begun_s = time.time()
    time.sleep(0.05)
    (tmp_path / "model" / "model.safetensors").write_text("vouched for")
    assert not namespace_of(NAMED_WEIGHTS, begun_s=begun_s).unshared
    (tmp_path / "model" / "config.json").write_text("{}")
    assert namespace_of(NAMED_WEIGHTS, begun_s=begun_s).unshared


def test_an_engine_without_a_time_in_its_name_began_with_its_process(
    namespace_of: NamespaceOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under Ray. The process here wrote the model itself."""
    assert not namespace_of().unshared
    monkeypatch.setattr(namespace, "RUN_VARIABLE", "UNSET_BY_ALL")
    monkeypatch.setattr(namespace, "RUN_NAME", re.compile("nothing"))
    assert namespace_of().unshared


def test_a_newer_commit_that_came_into_the_cache_does_not_name_what_was_loaded(
    namespace_of: NamespaceOf, tmp_path: Path
) -> None:
    """Another engine brought it while this one was running, before a backend was attached."""
    repository = tmp_path / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    for commit in ("a" * 40, "b" * 40):
        blob = repository / "blobs" / commit
        (repository / "snapshots" / commit).mkdir(parents=True)
        blob.write_text(commit)
        (repository / "snapshots" / commit / "model.safetensors").symlink_to(blob)
        (repository / "refs" / "main").write_text(commit)
    given = {"model_path": "org/name", "download_dir": str(tmp_path)}
    for commit, is_unshared in (("a" * 40, True), ("b" * 40, False)):
        read = SimpleNamespace(hf_config=SimpleNamespace(_commit_hash=commit))
        assert namespace_of(**given, _model_config=read).unshared == is_unshared


@pytest.mark.parametrize("source", sorted(namespace.UPDATES))
def test_an_engine_whose_weights_were_updated_has_no_name_for_them(
    namespace_of: NamespaceOf, source: str
) -> None:
    """As SGLang's rank notes it, here before a backend is attached once more."""
    pool = HostPool("kv", host_pool(mha_device_pool()))
    with use_context(RuntimeContext(parallel=ParallelContext())):
        context = publish(ServerArgs(model_path="dummy", device="cpu"), role="scheduler")
        context.override("another", tokenizer_path="elsewhere")
        assert not namespace_of(pool=pool).unshared
        context.override(source, weight_version="2")
        assert namespace_of(pool=pool).unshared
        assert not namespace_of(NAMED_WEIGHTS, pool=pool).unshared


def test_adapters_that_are_only_named_by_their_paths_are_not_shared_without_a_name() -> None:
    """SGLang turns LoRA on for them, and leaves the argument itself as it was given: not at all."""
    pool = HostPool("kv", host_pool(mha_device_pool()))
    with use_context(RuntimeContext(parallel=ParallelContext())):
        given = ServerArgs(model_path="dummy", device="cpu", lora_paths=["a=/adapters/a"])
        check_lora_server_args(given)
        publish(given, role="scheduler")
        assert given.enable_lora is None
        for lora_id, unshared in (("", True), ("a of May", False)):
            named = HiCacheOptions(weights_id="v7", lora_id=lora_id)
            made = namespace.build_namespace(storage_config({}), [pool], named, is_replicated=False)
            assert made.unshared is unshared


def test_engines_that_were_given_no_seed_have_the_ones_that_sglang_drew() -> None:
    """Which tell their clears apart where nothing else does."""
    made = set()
    for seed in (1, 2):
        with use_context(RuntimeContext(parallel=ParallelContext())):
            given = ServerArgs(model_path="dummy", device="cpu")
            declare_resolution(given, "_handle_missing_default_values", random_seed=seed)
            publish(given, role="scheduler")
            made.add(namespace.launch_id())
    assert len(made) == 2


def test_notes_of_updates_are_sglangs() -> None:
    root = Path(runtime_context.__file__).parent
    rooms = [root / room for room in ("managers", "model_executor")]
    texts = [file.read_text() for room in rooms for file in room.glob("*.py")]
    for source in namespace.UPDATES:
        assert any(f'"{source}"' in text for text in texts)


def test_weights_that_another_process_read_before_the_start_are_not_named_by_the_files(
    namespace_of: NamespaceOf,
) -> None:
    """Of SGLang's weight cache daemon, which outlives engines."""
    assert namespace_of(weight_cache_mode="client").unshared
    assert not namespace_of(NAMED_WEIGHTS, weight_cache_mode="client").unshared
    assert not namespace_of(weight_cache_mode="daemon").unshared, "that one is this start's own"


def test_a_drafter_whose_files_say_otherwise_computes_otherwise(
    namespace_of: NamespaceOf, tmp_path: Path
) -> None:
    draft = weights(tmp_path / "draft", b"the drafter's")
    before = namespace_of(speculative_draft_model_path=draft)
    (tmp_path / "draft" / "config.json").write_text("{}")
    assert namespace_of(speculative_draft_model_path=draft) != before


def test_of_a_file_that_an_argument_names_its_content_counts(
    namespace_of: NamespaceOf, tmp_path: Path
) -> None:
    """KV scales, of which a page of another scale is another."""
    scales = tmp_path / "scales.json"
    made = []
    for text in ("0.5", "0.25"):
        scales.write_text(text)
        made.append(namespace_of(quantization_param_path=str(scales)))
    assert made[0] != made[1]


def test_settings_as_json_are_the_same_in_another_order(namespace_of: NamespaceOf) -> None:
    of_images, of_videos = {"image": {"size": 4}}, {"video": {"fps": 1}}
    made = namespace_of(mm_process_config=of_images | of_videos)
    assert made == namespace_of(mm_process_config=of_videos | of_images)
    assert made != namespace_of(mm_process_config=of_videos)


def test_settings_of_the_loader_that_only_say_how_keep_nobody_apart(
    namespace_of: NamespaceOf,
) -> None:
    how = '{"enable_multithread_load": true, "num_threads": 8}'
    assert namespace_of(model_loader_extra_config=how) == namespace_of()
    for unknown in ('{"model_weights": "elsewhere"}', "[1]", "no JSON"):
        assert namespace_of(model_loader_extra_config=unknown).unshared


def test_states_of_another_type_are_not_taken_for_ones_own(
    make_backend: MakeBackend,
) -> None:
    """Two types of one width: --mamba-ssm-dtype bfloat16 and float16."""
    kinds = (torch.bfloat16, torch.float16, torch.bfloat16)
    first, other, alike = (
        make_backend(
            {PoolName.KV: host_pool(mha_device_pool()), PoolName.MAMBA: state_pool(temporal=kind)}
        )
        for kind in kinds
    )
    keys = [f"{number:064x}" for number in range(4)]
    assert first.batch_set_v1(keys, torch.arange(4 * first.mem_pool_host.page_size)) == [True] * 4
    assert (first.batch_exists(keys), alike.batch_exists(keys)) == (4, 4)
    assert other.batch_exists(keys) == 0


def test_replicas_of_an_engine_with_a_name_have_names_of_their_own() -> None:
    named = HiCacheOptions.from_extra_config({"interface_v1": 1, "engine_name": "prefill-7"})
    ids = set()
    for replica in (None, 0, 1):
        with get_parallel().override(dp_rank=replica):
            ids.add(namespace.rank_identity(storage_config({}), named, "kv").engine_id)
    assert len(ids) == 3
    assert all(each.startswith("prefill-7-") for each in ids)


def test_ranks_that_have_other_layers_heads_or_tokens_share_none() -> None:
    axes = (("tp_rank", "tp_size"), ("pp_rank", "pp_size"), ("attn_cp_rank", "attn_cp_size"))
    given = vars(storage_config({}))
    places = [SimpleNamespace(**given)]
    for rank, size in (*axes, ("dcp_rank", "dcp_size")):
        places += [SimpleNamespace(**given | {rank: number, size: 2}) for number in (0, 1)]
    own = [namespace._place(each, is_replicated=False) for each in places]
    assert len(set(own)) == len(places)
    shared = [namespace._place(each, is_replicated=True) for each in places]
    assert shared[1] == shared[2], "each rank of a tensor-parallel group has all heads"
    assert len(set(shared)) == len(places) - 1


@pytest.mark.parametrize("option", ["tenant", "account", "lora_id"])
def test_what_an_option_keeps_apart_is_not_shared(namespace_of: NamespaceOf, option: str) -> None:
    given = {"interface_v1": 1, "weights_id": "v7"}
    pair = [namespace_of(HiCacheOptions.from_extra_config(given | {option: n})) for n in ("a", "b")]
    assert pair[0] != pair[1]


def test_releases_of_sglang_share_none(
    namespace_of: NamespaceOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = namespace_of()
    monkeypatch.setattr(namespace, "_release", lambda: "another")
    assert namespace_of() != made


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Of which models the weights were named, and how each is loaded."""
    asked: list[tuple[Any, Any]] = []

    def note(model: Any, how: Any, begun_ns: int) -> Any:
        asked.append((model, how))
        return name_weights(model, how, begun_ns)

    monkeypatch.setattr(namespace, "name_weights", note)
    return asked


@pytest.mark.parametrize("name", ["revision", "speculative_draft_model_revision"])
def test_the_revision_that_was_asked_for_says_which_files_were_read(
    namespace_of: NamespaceOf, models: list[tuple[Any, Any]], name: str
) -> None:
    namespace_of(**{"speculative_draft_model_path": "owner/drafter", name: "v7"})
    asked = [model.revision for model, _ in models]
    assert asked == (["v7", None] if name == "revision" else [None, "v7"])


def test_the_config_that_the_engine_read_names_no_drafters_commit(
    namespace_of: NamespaceOf, models: list[tuple[Any, Any]]
) -> None:
    read = SimpleNamespace(hf_config=SimpleNamespace(_commit_hash="a" * 40))
    namespace_of(speculative_draft_model_path="owner/drafter", _model_config=read)
    assert [model.hf_config for model, _ in models] == [read.hf_config, None]


def test_a_drafter_in_the_models_own_files_is_asked_for_once(
    namespace_of: NamespaceOf, models: list[tuple[Any, Any]], tmp_path: Path
) -> None:
    """As of an MTP layer's."""
    own = namespace_of(speculative_draft_model_path=str(tmp_path / "model"))
    assert len(models) == 1
    assert own == namespace_of()


def test_how_weights_are_loaded_is_asked_for_as_sglang_has_it(
    namespace_of: NamespaceOf, models: list[tuple[Any, Any]]
) -> None:
    namespace_of(trust_remote_code=True, load_format="pt", download_dir="/models")
    [(model, how)] = models
    assert (model.trust_remote_code, how.load_format) == (True, "pt")
    assert how.download_dir == "/models"


def test_a_drafters_settings_that_changed_after_the_engine_began_are_shared_with_nobody(
    namespace_of: NamespaceOf, tmp_path: Path
) -> None:
    draft = weights(tmp_path / "draft", b"the drafter's")
    time.sleep(0.05)
    begun_s = time.time()
    time.sleep(0.05)
    (tmp_path / "draft" / "config.json").write_text("{}")
    given = {"speculative_draft_model_path": draft, "begun_s": begun_s}
    assert namespace_of(NAMED_WEIGHTS, **given).unshared


def test_operators_are_told_of_the_pages_in_fields_of_their_own(
    namespace_of: NamespaceOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = namespace_of(quantization="fp8")
    assert (made.quantization, made.kv_dtype, made.model) == ("fp8", "float32", "model")
    assert made.groups[0].tokens_per_block == PAGE_TOKENS
    only_tables = SimpleNamespace(kv_buffer=[torch.zeros(1, dtype=torch.uint8)])
    assert namespace._dtype_of(only_tables) == "uint8"
    monkeypatch.setattr(namespace, "server_arguments", lambda: None)
    pool = HostPool("kv", host_pool(mha_device_pool()))
    place = storage_config({}, model_name="served")
    unknown = namespace.build_namespace(place, [pool], OPTIONS, is_replicated=False)
    assert (unknown.model, unknown.unshared) == ("served", True)


@pytest.mark.parametrize("axis", ["tp_rank", "pp_rank", "attn_cp_rank", "dp_rank", "part"])
def test_ranks_of_an_engine_with_a_name_have_names_of_their_own(axis: str) -> None:
    named = HiCacheOptions(engine_name="decode-3")
    made = []
    for number in (0, 1):
        place = storage_config({}, **({} if axis == "part" else {axis: number}))
        part = f"kv-{number}" if axis == "part" else "kv"
        made.append(namespace.rank_identity(place, named, part))
    assert made[0].engine_id != made[1].engine_id
    assert made[0].boot_nonce != made[1].boot_nonce
