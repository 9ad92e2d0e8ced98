"""The list of vLLM's tests that can't apply is held to what a run says, both ways."""

from __future__ import annotations

from tests.vllm_conformance import report

FILE = "tests/v1/test_cache.py"


def result(outcome: str) -> dict[str, str]:
    return {"outcome": outcome, "message": "it said so"}


def test_listed_failure_is_excused_with_all_its_parameters() -> None:
    tests = {
        f"{FILE}::test_inner[a]": result("failed"),
        f"{FILE}::test_inner[b]": result("failed"),
        f"{FILE}::test_outer": result("passed"),
    }
    verdict = report.judge(tests, {f"{FILE}::test_inner": "reads what is inside"})
    assert verdict.is_sound
    assert verdict.counts["test_cache.py"] == {"failed": 2, "passed": 1}
    assert list(verdict.excused) == ["reads what is inside"]


def test_failure_that_nobody_listed_is_no_sound_verdict() -> None:
    verdict = report.judge({f"{FILE}::test_outer": result("failed")}, {})
    assert not verdict.is_sound
    assert "it said so" in "\n".join(report.lines(verdict, {"managers": 1, "calls": 1}))


def test_listed_test_that_passes_is_told() -> None:
    verdict = report.judge({f"{FILE}::test_inner": result("passed")}, {f"{FILE}::test_inner": "x"})
    assert not verdict.is_sound
    assert verdict.passes_now == [f"{FILE}::test_inner"]


def test_every_listed_test_has_a_reason() -> None:
    listed = report.reasons("synchronous")
    assert listed
    assert all(len(reason) > 20 for reason in listed.values())
