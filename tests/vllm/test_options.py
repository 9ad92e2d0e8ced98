"""The connector's options: what may be said, and what is said to whoever says it wrong."""

from __future__ import annotations

from typing import Any

import pytest

from kvd_client.integrations.vllm.options import FOREIGN_KEYS, KvdOptions


def refusal(**given: Any) -> str:
    with pytest.raises(ValueError, match="kv_connector_extra_config") as caught:
        KvdOptions.from_extra_config(given)
    return str(caught.value)


def test_nothing_said_is_the_daemons_own_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVD_SOCKET", raising=False)
    assert KvdOptions.from_extra_config({}).socket_path == "/run/kvd/kvd.sock"
    monkeypatch.setenv("KVD_SOCKET", "/elsewhere/kvd.sock")
    assert KvdOptions.from_extra_config({}).socket_path == "/elsewhere/kvd.sock"
    assert KvdOptions.from_extra_config({"socket_path": "/x"}).socket_path == "/x"


@pytest.mark.parametrize("path", ["relative/kvd.sock", ""])
def test_a_wrong_path_in_the_environment_is_refused_by_the_variables_name(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVD_SOCKET", path)
    with pytest.raises(ValueError, match=f"KVD_SOCKET is '{path}'"):
        KvdOptions.from_extra_config({})
    assert KvdOptions.from_extra_config({"socket_path": "/x"}).socket_path == "/x"


def test_a_path_as_grpc_writes_it_is_taken() -> None:
    assert KvdOptions.from_extra_config({"socket_path": "unix:/x/y"}).socket_path == "/x/y"
    assert KvdOptions.from_extra_config({"socket_path": "unix:///x/y"}).socket_path == "/x/y"


def test_vllms_own_keys_are_let_through() -> None:
    KvdOptions.from_extra_config(
        {
            "spec_name": "KvdOffloadingSpec",
            "spec_module_path": "kvd_client.integrations.vllm.spec",
            "blocks_per_chunk": 4,
            "offload_prompt_only": False,
            "self_describing_kv_events": True,
            "sync_load_budget_bytes": 0,
        }
    )


@pytest.mark.parametrize("key", sorted(FOREIGN_KEYS))
def test_what_other_specs_read_is_refused_with_the_way_out(key: str) -> None:
    said = refusal(**{key: 1})
    assert key in said
    assert "leave this out" in said


def test_a_slip_of_the_pen_is_refused_with_the_right_name() -> None:
    assert "did you mean socket_path" in refusal(socket="/x")
    assert "did you mean offload_prompt_only" in refusal(offload_prompts_only=True)
    assert "known are account" in refusal(zzzzz=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lookup_deadline_s", -0.001),
        ("lookup_deadline_s", 1.5),
        ("lookup_deadline_s", float("nan")),
        ("lookup_deadline_s", "0.005"),
        ("lookup_deadline_s", True),
        ("silent_after_s", 0),
        ("hand_off_s", 601),
        ("min_load_tokens", -1),
        ("min_load_tokens", (1 << 30) + 1),
        ("min_load_tokens", 1.0),
        ("min_load_tokens", True),
        ("unshared", "yes"),
        ("watch_removals", 1),
        ("tenant", 7),
        ("weights_id", "x" * 257),
        ("socket_path", "relative/kvd.sock"),
        ("socket_path", "/" + "x" * 96),
        ("socket_path", "/run/\0kvd.sock"),
        ("socket_path", "/run/\ud800.sock"),
        ("tenant", "half of a pair: \ud800"),
        ("offload_prompt_only", "false"),
        ("offload_prompt_only", 0),
        ("self_describing_kv_events", "no"),
        ("blocks_per_chunk", 2.7),
        ("blocks_per_chunk", "two"),
        ("blocks_per_chunk", True),
        ("blocks_per_chunk", 0),
        ("block_size", [64]),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_what_is_allowed(name: str, value: Any) -> None:
    said = refusal(**{name: value})
    assert f"{name} is" in said
    assert "allowed is" in said


def test_a_key_that_is_no_string_is_an_unknown_option() -> None:
    with pytest.raises(ValueError, match="unknown option 1"):
        KvdOptions.from_extra_config({1: "/x"})  # type: ignore[dict-item]


@pytest.mark.parametrize("value", [1, 4, "4"])
def test_vllms_counts_are_taken_as_vllm_takes_them(value: Any) -> None:
    ours = KvdOptions.from_extra_config({})
    assert KvdOptions.from_extra_config({"blocks_per_chunk": value}) == ours
    assert KvdOptions.from_extra_config({"block_size": value}) == ours


def test_whole_numbers_are_seconds_too() -> None:
    assert KvdOptions.from_extra_config({"hand_off_s": 5}).hand_off_s == 5.0


def test_the_scheduler_side_gets_its_deadlines() -> None:
    given = {
        "lookup_deadline_s": 0.01,
        "lookup_give_up_s": 0.2,
        "retry_deadline_s": 0.3,
        "pending_deadline_s": 4.0,
        "hand_off_s": 5.0,
    }
    options = KvdOptions.from_extra_config(given).scheduler_options()
    assert {name: getattr(options, name) for name in given} == given
