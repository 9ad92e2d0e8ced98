"""What SGLang finds once the weights of its model were changed while it runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.weight_checker import WeightChecker

from kvd_client.integrations.sglang import namespace, weights
from kvd_client.integrations.sglang.weights import WeightsWatch
from tests.sglang.conftest import StartRank
from tests.sglang.prompts import PAGES, prompt
from tests.sglang.rig import PAGE_TOKENS, Rank, mla_device_pool, parallel

TOKENS = PAGES * PAGE_TOKENS


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[Any] = []

    def load_weights(self, named_tensors: Any) -> None:
        self.loaded += named_tensors


def updater(model: torch.nn.Module) -> Any:
    """SGLang's own, for a model without quantised layers."""
    return weight_updater.WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=SimpleNamespace(dtype=torch.float32),
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=lambda *_, **__: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: None,
    )


def change(*, buckets: int = 1) -> None:
    """As trainers do: weights in several buckets."""
    one = updater(model := Model())
    for number in range(buckets):
        assert one.load_weights_from_distributed([(f"w{number}", torch.ones(2))])[0]
    assert len(model.loaded) == buckets


def store(rank: Rank, number: int) -> int:
    indices = rank.fill(prompt(number), seed=number)
    stored = rank.backup(prompt(number), indices)
    rank.free(indices)
    return stored


def found(rank: Rank, number: int) -> int:
    done, indices = rank.prefetch(prompt(number))
    assert rank.wrong_pages(indices, done, number) == []
    rank.free(indices)
    return done


@pytest.fixture(autouse=True)
def _one_start(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = SimpleNamespace(model_path="m", random_seed=1, port=30000)
    monkeypatch.setattr(namespace, "server_arguments", lambda: arguments)
    monkeypatch.setattr(namespace, "_files", lambda *_: namespace.ModelFiles([], [], []))
    no_cache = SimpleNamespace(weight_cache_mode="off")
    monkeypatch.setattr(weight_updater, "get_model", lambda: no_cache)
    monkeypatch.setattr(weight_updater, "_unsupported_derived_weight_cache_error", lambda _: None)
    unpacked = SimpleNamespace(
        restore_weights_before_loading=lambda *_: None, postprocess_weights=lambda *_: None
    )
    monkeypatch.setattr(weight_updater, "DefaultModelLoader", unpacked)


def test_pages_of_the_old_weights_are_not_found_after_a_flush(start_rank: StartRank) -> None:
    rank = start_rank()
    assert store(rank, 1) == TOKENS
    change(buckets=3)
    rank.controller.reset()  # as SGLang's flush does
    assert found(rank, 1) == 0
    assert store(rank, 1) == TOKENS
    assert found(rank, 1) == TOKENS
    rank.controller.reset()  # which changes no weights
    assert found(rank, 1) == TOKENS
    assert rank.backend.clear()
    assert found(rank, 1) == 0
    assert found(start_rank(), 1) == TOKENS  # an engine of the weights as they were


def test_an_engine_moves_on_once_for_each_change(start_rank: StartRank) -> None:
    """Each time all that is under way would fail, and the daemon be waited for."""
    rank = start_rank()
    [batches] = rank.backend._opened
    for number in (1, 2):
        change()
        rank.controller.reset()
        assert store(rank, 14) == TOKENS
        assert found(rank, 14) == TOKENS
        assert batches._resets == number


def test_weights_that_change_as_an_engine_moves_on_wait_for_another_flush(
    start_rank: StartRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = start_rank()
    enter = rank.backend._enter_epoch

    def enter_and_change() -> None:
        enter()
        change()

    monkeypatch.setattr(rank.backend, "_enter_epoch", enter_and_change)
    change()
    rank.controller.reset()
    assert store(rank, 15) == 0
    monkeypatch.setattr(rank.backend, "_enter_epoch", enter)
    rank.controller.reset()
    assert store(rank, 15) == TOKENS


def test_an_update_that_ends_after_its_flush_needs_no_other(start_rank: StartRank) -> None:
    """As `flush_cache`, which is on unless told otherwise, flushes within the last update."""
    rank = start_rank()
    assert store(rank, 7) == TOKENS
    one = updater(Model())
    one.begin_weight_update()
    assert one.load_weights_from_distributed([("w", torch.ones(2))])[0]
    rank.controller.reset()
    assert store(rank, 8) == TOKENS  # of weights that are not yet as they shall be
    one.end_weight_update(run_post_load=False)
    assert (found(rank, 7), found(rank, 8)) == (0, 0)
    assert store(rank, 7) == TOKENS
    assert found(rank, 7) == TOKENS


def test_pages_that_were_computed_between_a_flush_and_the_end_are_not_kept_after_it(
    start_rank: StartRank,
) -> None:
    """SGLang's own cache has them, and stores them when it likes."""
    rank = start_rank()
    one = updater(Model())
    one.begin_weight_update()
    assert one.load_weights_from_distributed([("w", torch.ones(2))])[0]
    rank.controller.reset()
    computed = rank.allocator.alloc(TOKENS)
    assert computed is not None
    indices = rank.fill(prompt(12), seed=12)
    one.end_weight_update(run_post_load=False)
    assert (rank.backup(prompt(12), indices), found(rank, 12)) == (0, 0)
    rank.controller.reset()
    rank.free(indices)
    rank.allocator.clear()  # as SGLang's flush does
    assert found(rank, 12) == 0
    assert store(rank, 12) == TOKENS


@pytest.mark.parametrize("run_post_load", [False, True])
def test_an_update_that_ends_after_a_change_waits_for_a_flush(
    start_rank: StartRank, *, run_post_load: bool
) -> None:
    """Where SGLang has loaded nothing itself, another has written the weights until the end."""
    rank = start_rank()
    one = updater(Model())
    one.begin_weight_update()
    if run_post_load:
        rank.controller.reset()
    else:
        assert one.load_weights_from_distributed([("w", torch.ones(2))])[0]
    one.end_weight_update(run_post_load=run_post_load)
    assert store(rank, 9) == 0
    rank.controller.reset()
    assert store(rank, 9) == TOKENS


def test_pages_that_sglang_has_not_flushed_are_neither_kept_nor_found(
    start_rank: StartRank, caplog: pytest.LogCaptureFixture
) -> None:
    rank = start_rank()
    assert store(rank, 2) == TOKENS
    for number in (1, 2):
        change()
        assert (found(rank, 2), store(rank, 3)) == (0, 0)
        assert caplog.text.count("not used until SGLang's cache is flushed") == number
        if number == 1:
            rank.controller.reset()
            assert found(rank, 2) == 0
    rank.attach_anew()
    assert (found(rank, 2), store(rank, 3)) == (0, 0)
    rank.controller.reset()
    assert (found(rank, 2), found(rank, 3)) == (0, 0)


def test_pages_of_weights_that_a_checker_has_filled_with_noise_are_not_shared(
    start_rank: StartRank,
) -> None:
    """As `/weights_checker` does with "reset_tensors"."""
    rank = start_rank()
    assert store(rank, 10) == TOKENS
    model = torch.nn.Linear(2, 2, bias=False)
    with parallel(), get_parallel().override(dp_rank=None, attn_dp_size=1):
        checker = WeightChecker(get_model=lambda: model)
    checker.handle("snapshot", role="target")  # which changes nothing
    assert found(rank, 10) == TOKENS
    with torch.no_grad():
        checker.handle("reset_tensors", role="target")
    assert (found(rank, 10), store(rank, 11)) == (0, 0)
    rank.controller.reset()
    assert store(rank, 11) == TOKENS
    assert (found(rank, 10), found(start_rank(), 11)) == (0, 0)


@pytest.mark.parametrize("weights_id", ["", "v1"])
def test_a_backend_that_is_attached_anew_goes_on_without_the_old_pages(
    start_rank: StartRank, weights_id: str
) -> None:
    """Also of MLA, whose pages outlive the session where the engine shares none."""
    unshared = {"unshared": True, "weights_id": weights_id}
    rank = start_rank(device_pool=mla_device_pool(), options=unshared)
    assert store(rank, 4) == TOKENS
    change()
    rank.controller.reset()
    rank.attach_anew(**unshared)
    assert found(rank, 4) == 0


def test_weights_that_have_a_new_name_are_shared_under_it(start_rank: StartRank) -> None:
    names = [{"weights_id": "step-1"}, {"weights_id": "step-2"}]
    rank = start_rank(options=names[0])
    assert store(rank, 5) == TOKENS
    change()
    rank.controller.reset()
    rank.attach_anew(**names[1])
    assert store(rank, 6) == TOKENS
    later = [start_rank(options=name) for name in names]
    assert [found(each, 5) for each in later] == [TOKENS, 0]
    assert [found(each, 6) for each in later] == [0, TOKENS]
    change()
    rank.controller.reset()
    rank.attach_anew(**names[0])  # which may be right, and may be not
    assert found(rank, 5) == 0


class SomeUpdater:
    def update_weights_from_disk(self) -> None:
        """Changes nothing."""


def test_a_release_without_one_of_the_classes_is_watched_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "watch", WeightsWatch())
    monkeypatch.setattr(weights, "UPDATER", (__name__, SomeUpdater.__name__))
    monkeypatch.setattr(weights, "CONTROLLER", (__name__, "NoController"))
    monkeypatch.setattr(weights, "CHECKER", ("sglang.nowhere", "NoChecker"))
    missing = weights.watch_weights()
    assert "_reset_tensors" in missing
    assert "update_weights_from_disk" not in missing
    SomeUpdater().update_weights_from_disk()
    assert weights.watch.changes == 1


def test_whatever_of_sglangs_changes_weights_is_watched() -> None:
    changing = ("begin_weight_update", "load_weights_", "update_weights_")
    methods = {name for name in vars(weight_updater.WeightUpdater) if name.startswith(changing)}
    assert methods == set(weights.CHANGING)


def test_experts_that_are_read_once_more_are_no_change() -> None:
    class Updater:
        def update_weights_from_disk(self, path: str, *, weight_name_filter: Any = None) -> str:
            return path

    class Controller:
        def reset(self, *, fails: bool = False) -> None:
            if fails:
                raise RuntimeError("a storage thread does not end")

    class Checker:
        pass

    watch = WeightsWatch()
    missing = watch.begin(Updater, Controller, Checker)
    assert {"begin_weight_update", "_reset_tensors"} <= set(missing)
    watch.begin(Updater, Controller, Checker)  # once more wraps nothing twice
    for names in (str.isupper, None):  # None where a model can't name its experts' weights
        assert Updater().update_weights_from_disk("p", weight_name_filter=names) == "p"
    assert watch.changes == 0
    assert Updater().update_weights_from_disk("p") == "p"
    assert watch.changes == 1
    with pytest.raises(RuntimeError):
        Controller().reset(fails=True)
    assert watch.flushed_changes == 0
    Controller().reset()
    assert watch.flushed_changes == 1
