"""The GPU's probe, benchmark and check do run: on the fake driver too, in tiny sizes.

Their figures mean nothing here and are thrown away; a mistake that only a GPU machine would have
met, in minutes that are dear, is met here instead.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import check, facts, places, verdicts
from benchmarks.gpu.probe import QUESTIONS
from benchmarks.gpu.probing.products import by_phase
from tests.gpu.driver import Driver

ROOT = Path(__file__).resolve().parents[2]
# What our own mistakes look like inside an answer: a refusal of the driver's is `Failed`.
OUR_MISTAKES = re.compile(
    r"(Attribute|Type|Key|Name|Index|Assertion|Unbound|Value)Error: [^\"]*|takes \d+ positional"
)


def run(module: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a module as its command line does."""
    environment = os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")} | variables
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("benchmarks.gpu.probe", "no GPU to probe"),
        ("benchmarks.gpu.copies", "no GPU to measure"),
        ("benchmarks.gpu.check", "There is no GPU here"),
    ],
)
def test_without_a_gpu_it_says_so_in_its_first_line_and_fails(
    module: str, says: str, driver: Driver
) -> None:
    if not driver.is_fake:
        pytest.skip("there is a GPU here")
    told = run(module, LD_LIBRARY_PATH="")
    assert (told.stdout + told.stderr).startswith(says)
    assert told.returncode == 1


@pytest.fixture(scope="module")
def probed(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the probe wrote."""
    output = tmp_path_factory.mktemp("probe") / "probe.json"
    copied = output.parent / "copies"
    told = run("benchmarks.gpu.probe", "--tiny", f"--output={output}", KVD_GPU_RESULTS=str(copied))
    assert output.exists(), told.stdout + told.stderr
    assert (copied / "gpu-probe.json").read_text() == output.read_text()
    written: dict[str, Any] = json.loads(output.read_text())
    return written


def test_every_question_of_the_probe_is_answered(probed: dict[str, Any], driver: Driver) -> None:
    asked = probed["questions"]
    assert set(asked) == set(QUESTIONS)
    failed = {name: told["failed"] for name, told in asked.items() if "failed" in told}
    if driver.is_fake:  # it multiplies no matrices
        assert "nothing here multiplies" in failed.pop("products")
    assert failed == {}


def test_no_answer_of_the_probe_is_a_mistake_of_its_own(probed: dict[str, Any]) -> None:
    mistakes = {
        name: OUR_MISTAKES.findall(json.dumps(told)) for name, told in probed["questions"].items()
    }
    assert {name: found for name, found in mistakes.items() if found} == {}


def test_a_single_question_leaves_the_other_answers_as_they_are(
    probed: dict[str, Any], tmp_path: Path, driver: Driver
) -> None:
    output = tmp_path / "probe.json"
    output.write_text(json.dumps(probed))
    run("benchmarks.gpu.probe", "--tiny", f"--output={output}", "kinds", KVD_COMMIT="another")
    told = json.loads(output.read_text())["questions"]
    if not driver.is_fake:
        pytest.skip("a real driver's answers differ")
    assert told["kinds"]["commit"] == "another"
    assert told["handles"] == probed["questions"]["handles"]
    assert told.keys() == probed["questions"].keys()
    run("benchmarks.gpu.probe", f"--output={output}", "kinds")  # of another scale
    assert json.loads(output.read_text())["questions"].keys() == {"kinds"}


def test_the_stress_finds_all_bytes_right_and_kills_movers(tmp_path: Path) -> None:
    output = tmp_path / "stress.json"
    told = run("benchmarks.gpu.stress", "--tiny", "--seconds=10", f"--output={output}")
    assert told.returncode == 0, told.stdout + told.stderr
    rows = json.loads(output.read_text())["results"]
    assert len(rows) == 4
    assert all(row["wrong"] == [] and row["blocks found right"] for row in rows)
    assert sum(row.get("movers killed", 0) for row in rows) > 0


def test_the_probe_sees_what_one_process_writes_into_anothers_memory(
    probed: dict[str, Any],
) -> None:
    answer = probed["questions"]["handles"]["answer"]
    assert answer["bytes_arrive"] is True
    assert answer["what_the_importer_writes_is_seen"] is True
    assert "failed" in answer["opened_by_its_exporter"]


def test_every_way_of_copying_is_timed_in_both_directions(probed: dict[str, Any]) -> None:
    rows = probed["questions"]["copies"]["answer"]["idle"]
    timed = {(row["way"], row["is_store"]) for row in rows if row.get("wall_s")}
    ways = {"large", "plain", "batch", "strided", "kernel"}
    assert timed == {(way, is_store) for way in ways for is_store in (True, False)}


def test_every_way_of_copying_moves_every_byte_to_its_place(probed: dict[str, Any]) -> None:
    rows = probed["questions"]["copies"]["answer"]["idle"]
    assert [row for row in rows if row.get("moved_right") is not True] == []


def test_the_page_can_be_made_from_what_the_probe_wrote(probed: dict[str, Any]) -> None:
    page = facts.PAGE.read_text()
    filled = facts.render(page, [probed])
    assert facts.render(filled, [probed]) == filled, "the marks survive"
    assert f"{probed['device']['name']}, commit" in filled
    assert re.search(r"\| 2048 KiB \| store \| [\d.]+ \|", filled)


# The fake multiplies no matrices: a torch that takes a moment over it and says nothing.
STAND_IN_TORCH = """
import contextlib, time
__version__, bfloat16 = "stand-in", None
class cuda:
    class Stream:
        cuda_stream = 0
    is_available = staticmethod(lambda: True)
    synchronize = staticmethod(lambda: None)
    stream = staticmethod(lambda stream: contextlib.nullcontext())
def randn(*shape, **kind): pass
def empty_like(tensor): pass
def mm(*tensors, out): time.sleep(0.0002)
"""
ASK_FOR_PRODUCTS = """
import json
from dataclasses import replace
from benchmarks.gpu.probing.scale import TINY
from benchmarks.gpu.probing.speed import products
print(json.dumps(products(replace(TINY, torch=True, phase_seconds=0.03))))
"""


def test_an_engines_products_are_set_against_those_of_its_idle_phase(
    driver: Driver, tmp_path: Path
) -> None:
    if not driver.is_fake:
        pytest.skip("the probe itself does this with the real torch")
    (tmp_path / "torch.py").write_text(STAND_IN_TORCH)
    found = [str(ROOT), str(tmp_path), os.environ["PYTHONPATH"]]
    told = subprocess.run(
        [sys.executable, "-c", ASK_FOR_PRODUCTS],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(found)},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    answer = json.loads(told.stdout)
    assert answer["library"] == "torch stand-in"
    assert answer["phases"]["idle"]["ratio"] in ([1.0], []), "[]: no batch fell into the phase"
    copied = [phase["copies_bytes_per_s"] for phase in answer["phases"].values()]
    assert all("ok" in one for rounds in copied for one in rounds)


@pytest.fixture(scope="module")
def measured(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the benchmark of copies wrote."""
    output = tmp_path_factory.mktemp("copies") / "copies.json"
    told = run("benchmarks.gpu.copies", "--tiny", f"--output={output}")
    assert output.exists(), told.stdout + told.stderr
    written: dict[str, Any] = json.loads(output.read_text())
    return written


def test_the_copies_run_by_daemon_mover_and_peers(measured: dict[str, Any]) -> None:
    races = measured["results"]["races"]
    cases = {(row["fragment"], "+".join(row["kinds"])) for row in races if not row["busy"]}
    assert cases == {(32 << 10, kinds) for kinds in ("store", "load", "store+load")}
    assert [row["failed"] for row in races if row["failed"]] == []
    for row in races:
        ran = set(row["seconds"])
        assert {"large", "plain", "batch", "mover", *verdicts.DAEMON} <= ran or row["busy"]
        assert {len(seconds) for seconds in row["seconds"].values()} == {measured["rounds"]}


def test_a_jobs_overhead_is_measured_for_both_directions(measured: dict[str, Any]) -> None:
    rows = measured["results"]["overhead"]
    assert [row["kind"] for row in rows] == ["store", "load"]
    assert [row["failed"] for row in rows if "failed" in row] == []


def test_every_bar_of_the_copies_has_a_verdict(measured: dict[str, Any]) -> None:
    bars = [verdict for verdict in measured["verdicts"] if verdict["bar"]]
    assert len(bars) == 3 * 2 + 3 + 2, "mover, daemon twice, mover beside a batch, overhead"
    assert all(verdict["met"] is not None or verdict["why"] for verdict in bars)


# -- what needs no driver at all ------------------------------------------------------------------


def race(**seconds: list[float]) -> dict[str, Any]:
    told = {"fragment": 2 << 20, "kinds": ["store"], "busy": False, "failed": {}}
    return told | {"seconds": seconds}


def test_a_ratio_is_of_the_same_round_and_meets_its_bar_by_its_median() -> None:
    found = verdicts.of_races([race(large=[1.0, 2.0, 3.0], mover=[1.0, 2.5, 3.0])])
    (mover,) = found
    assert mover.figure is not None
    assert (mover.figure.median, mover.figure.low) == (1.0, 0.8)
    assert (mover.bar, mover.met) == ("≥ 0.95", True)


def test_a_contender_that_could_not_run_misses_its_bar_with_a_reason() -> None:
    row = race(large=[1.0]) | {"failed": {"daemon": "it did not start"}}
    (daemon,) = verdicts.of_races([row])
    assert (daemon.bar, daemon.met, daemon.why) == ("≥ 0.95", None, "it did not start")
    assert "not measured: it did not start" in daemon.line()


def test_a_busy_race_has_figures_and_no_bar() -> None:
    row = race(large=[1.0], mover=[4.0], batch=[1.0]) | {"busy": True}
    assert [verdict.bar for verdict in verdicts.of_races([row])] == ["", "", ""]


def test_the_overhead_is_what_a_job_takes_beyond_the_plain_copy() -> None:
    row = {"kind": "load", "plain_copy_s": [40e-6] * 3, "seconds": [240e-6, 340e-6, 440e-6]}
    row |= {"from_step_s": [540e-6] * 3, "copy_engine_s": [60e-6] * 3}
    found = [v for v in verdicts.of_overhead([row]) if v.figure is not None]
    figures = [round(v.figure.median) for v in found if v.figure is not None]
    assert figures == [300, 500, 20, 40]
    assert [(v.bar, v.met) for v in found] == [("≤ 300", True), *[("", None)] * 3]


def test_products_count_in_the_phase_that_holds_them_whole() -> None:
    rounds = [{"idle": (0.0, 1.0), "store": (2.0, 3.0)}]
    samples = [[0.5, 100.0], [0.9, 100.0], [2.05, 100.0], [2.5, 102.0], [3.5, 500.0]]
    assert by_phase(rounds, samples) == {
        "idle": {"ms": [100.0], "ratio": [1.0]},
        "store": {"ms": [102.0], "ratio": [1.02]},
    }


def test_the_page_of_facts_is_what_the_results_say() -> None:
    page = facts.PAGE.read_text()
    assert facts.render(page, facts.probes(places.RESULTS)) == page, (
        "python3 -m benchmarks.gpu.facts"
    )


def test_the_page_of_facts_asks_every_question_of_the_probe() -> None:
    assert {mark[1] for mark in facts.MARKED.findall(facts.PAGE.read_text())} == set(QUESTIONS)


MADE_UP = {
    "device": {"name": "Made Up 9000"},
    "commit": "abc1234",
    "time": "then",
    "questions": {
        "handles": {
            "answer": {
                "bytes_arrive": True,
                "opened_by_its_exporter": {"failed": "cuIpcOpenMemHandle: NO|WAY (201)"},
                "close": {"ok": None},
                "deaths": [{"step": "first", "bytes": 3 << 30}],
                "killed": [
                    {
                        "ok": {
                            "free": 1 << 37,
                            "gone_after_s": wait,
                            "still_reads": {"ok": "5a" * 16},
                        }
                    }
                    for wait in (0.06, 0.05, 0.07)
                ],
                "freed": [{"ok": {"close": {"ok": None}}}, {"failed": "NO|WAY"}],
                "range_of_the_import": {"ok": [12918456320, 64 << 20]},
                "pointer": {"device_pointer": 12918456320, "mapped": 1, "legacy_ipc_capable": 0},
                "seconds": [0.5, 1.5, 1.0],
            }
        },
        "footprint": {"failed": "TimeoutError: the process does not answer"},
    },
}


def test_a_table_of_facts_tells_answers_refusals_and_samples() -> None:
    page = "A\n<!-- facts: handles -->\nold\n<!-- end -->\nB\n"
    assert facts.render(page, [MADE_UP]).splitlines() == [
        "A",
        "<!-- facts: handles -->",
        "Made Up 9000, commit abc1234, then",
        "",
        "| fact | figure |",
        "|---|---|",
        "| bytes arrive | yes |",
        "| opened by its exporter | refused: cuIpcOpenMemHandle: NO/WAY (201) |",
        "| close | worked |",
        "| deaths first: bytes | 3 GiB |",
        "| killed: gone after | 60 ms (50 to 70, 3 samples) |",
        "| killed: still reads | yes, 0x5a throughout |",
        "| freed: trial 1: close | worked |",
        "| freed: trial 2 | refused: NO/WAY |",
        "| range of the import | 0x302000000, 64 MiB |",
        "| pointer: legacy ipc capable | no |",
        "| seconds | 1 s (0.5 to 1.5, 3 samples) |",
        "<!-- end -->",
        "B",
    ]


def test_what_is_asked_of_several_things_stands_side_by_side() -> None:
    kinds = {
        "malloc": {"pointer": {"is_managed": 0}, "legacy handle": {"ok": None}},
        "managed": {"failed": "none here"},
        "opened by descriptor": {"ok": {"bytes taken": 64 << 20}},
    }
    table = facts.tables("kinds", [{**MADE_UP, "questions": {"kinds": {"answer": kinds}}}])
    assert table.splitlines()[2:] == [
        "| fact | malloc | managed |",
        "|---|---|---|",
        "| pointer: is managed | no |  |",
        "| legacy handle | worked |  |",
        "| all of it |  | refused: none here |",
        "",
        "| fact | figure |",
        "|---|---|",
        "| opened by descriptor: bytes taken | 64 MiB |",
    ]


def test_a_question_that_failed_is_shown_as_failed_and_one_not_asked_as_not_measured() -> None:
    assert "`TimeoutError: the process does not answer`" in facts.tables("footprint", [MADE_UP])
    assert facts.tables("wakes", [MADE_UP]).startswith("Not measured yet")


@pytest.mark.parametrize(
    ("kind", "needed", "says"),
    [
        ("tmpfs", 0, None),
        ("tmpfs", 1 << 60, "mount -o remount,size="),
        ("overlay", 0, "is no tmpfs"),
        (None, 0, "is no tmpfs"),
    ],
)
def test_shared_memory_that_will_not_do_is_told_with_what_to_do(
    tmp_path: Path, kind: str | None, needed: int, says: str | None
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"none {tmp_path} {kind} rw 0 0\n" if kind else "none / overlay rw 0 0\n")
    flaw = places.flaw_of_shared_memory(tmp_path, needed, mounts)
    assert (flaw is None) == (says is None)
    assert says is None or says in str(flaw)
    assert "there is no" in str(places.flaw_of_shared_memory(tmp_path / "nowhere", 0, mounts))


def test_results_lie_in_a_folder_of_the_devices_name() -> None:
    assert places.folder_of("NVIDIA H100 80GB HBM3") == places.RESULTS / "nvidia-h100-80gb-hbm3"


def test_a_step_that_hangs_is_ended_and_fails() -> None:
    log = io.BytesIO()
    hanging = check.Step(
        "hanging", ("-c", "import time; print('on', flush=True); time.sleep(300)"), 1.0
    )
    outcome = check.run(hanging, dict(os.environ), log)
    assert (outcome.status, outcome.word) == (None, "FAIL (its time was up)")
    assert b"\non\n" in log.getvalue()


def test_a_failed_step_fails_the_check_and_every_step_is_told(tmp_path: Path) -> None:
    outcomes = [
        check.run(
            check.Step(name, ("-c", f"raise SystemExit({status})"), 30),
            dict(os.environ),
            io.BytesIO(),
        )
        for name, status in (("one", 1), ("two", 0))
    ]
    (tmp_path / "gpu-tests.xml").write_text(f"<skipped>{places.ROOT}/tests/gpu/x.py:7</skipped>")
    assert check.report(outcomes, tmp_path) == 1
    assert (tmp_path / "gpu-tests.xml").read_text() == "<skipped>tests/gpu/x.py:7</skipped>"
    told = json.loads((tmp_path / "gpu-check.json").read_text())
    assert [(step["name"], step["status"]) for step in told["steps"]] == [("one", 1), ("two", 0)]
    assert check.report(outcomes[1:], tmp_path) == 0


def test_results_are_kept_after_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, copies = tmp_path / "results", tmp_path / "copies"
    results.mkdir()
    monkeypatch.setenv("KVD_GPU_RESULTS", str(copies))
    seen = []

    def after_each(outcomes: Sequence[check.Outcome]) -> None:
        check.keep(outcomes, results)
        kept = json.loads((copies / "gpu-check.json").read_text())
        seen.append([step["name"] for step in kept["steps"]])
        assert b"first says" in (copies / "gpu-check.log").read_bytes()

    steps = [check.Step(name, ("-c", f"print('{name} says')"), 30) for name in ("first", "second")]
    with (results / "gpu-check.log").open("wb") as log:
        check.run_all(steps, dict(os.environ), log, 60, after_each)
    assert seen == [["first"], ["first", "second"]]


# What they ask of free memory they ask of the fake alone.
ONLY_ON_THE_FAKE = {
    "test_benchmarks_run.py",
    "test_cuda_mover.py",
    "test_fake_driver.py",
    "test_registration.py",
    "test_worker_register.py",
}


def test_tests_that_judge_free_memory_run_alone_in_the_check(tmp_path: Path) -> None:
    steps = {step.name: step.arguments for step in check.steps(tmp_path)}
    left_out = {path.removeprefix("--ignore=") for path in steps["tests"] if "--ignore=" in path}
    alone = {path for path in steps["memory"] if path.startswith("tests/gpu/test_")}
    assert left_out - alone == {"tests/gpu/test_benchmarks_run.py"}
    assert alone <= left_out
    assert all((ROOT / path).is_file() for path in left_out)
    for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        text = path.read_text()
        judges = "free_bytes()" in text or "wait_free" in text
        named = str(path.relative_to(ROOT)) in left_out
        assert named or not judges or path.name in ONLY_ON_THE_FAKE, path.name


def test_the_check_names_its_steps_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "VLLM_WHEELS", tmp_path)
    steps = check.steps(tmp_path)
    names = ["imports", "probe", "tests", "memory", "stress", "copies", "demo"]
    assert [step.name for step in steps] == names
    patient = check.steps(tmp_path, 2.0)
    assert [step.limit_s for step in patient] == [2 * step.limit_s for step in steps]
    (tmp_path / "vllm-1-py3-none-any.whl").touch()
    assert [step.name for step in check.steps(tmp_path)] == [*names, "vllm", "hybrid"]


def test_a_step_that_no_time_is_left_for_fails_without_being_run(tmp_path: Path) -> None:
    told = tmp_path / "told"
    step = check.Step("late", ("-c", f"open({str(told)!r}, 'w')"), 30)
    (outcome,) = check.run_all([step], dict(os.environ), io.BytesIO(), seconds=0)
    assert (outcome.status, told.exists()) == (None, False)
    (outcome,) = check.run_all([step], dict(os.environ), io.BytesIO())
    assert (outcome.status, told.exists()) == (0, True)
