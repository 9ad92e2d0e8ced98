"""The status page: its figures are those of /metrics, it costs little, and a browser shows it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.client import HTTPMessage
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvd import __version__
from kvd.core.machine import Machine, MachineConfig
from kvd.observability import status_page
from kvd.observability.status_page import (
    MAX_ROWS_SHOWN,
    MAX_SAMPLES,
    SAMPLE_SECONDS,
    SAMPLE_SHARE,
    Sources,
    StatusPage,
)
from tests.control.browser import CHROMIUM, Browser, browser
from tests.control.daemon_rig import RawEngine, RunningDaemon, block, daemon
from tests.ports import free_port
from tests.waiting import wait_until

PORT = free_port()
BAD_NAME = "<img src=x onerror=alert(1)>"
SETTINGS = f"""
[tenants.{json.dumps(BAD_NAME)}]
uids = [{os.getuid()}]
"""
wants_a_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium; on Debian: apt-get install chromium"
)


def get(path: str, port: int = PORT) -> tuple[HTTPMessage, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=25) as answer:
        return answer.headers, answer.read().decode()


def figures() -> Any:
    return json.loads(get("/status/figures")[1])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    file = tmp_path_factory.mktemp("settings") / "kvd.toml"
    file.write_text(SETTINGS)
    with daemon("--http-port", str(PORT), "--config", str(file)) as started:
        yield started


@pytest.fixture(scope="module")
def engine(running: RunningDaemon) -> Iterator[RawEngine]:
    made = RawEngine(running.socket)
    made.store({number: block(number) for number in range(1, 9)})
    made.load([1, 2, 3])
    yield made
    made.close()


def texts(of: Any) -> set[str]:
    """Every text among some figures' values."""
    if isinstance(of, str):
        return {of}
    inside = of.values() if isinstance(of, dict) else of if isinstance(of, list) else ()
    return {text for each in inside for text in texts(each)}


def test_the_figures_tell_no_more_than_the_metrics_do(engine: RawEngine) -> None:
    wait_until(lambda: figures()["pool"]["blocks"] == 8, "a sample after the store", 30)
    said = figures()
    del said["columns"], said["state"]  # our own words
    metrics = get("/metrics")[1].replace('\\"', '"')
    told = texts(said)
    assert {BAD_NAME, "host-shm", __version__} <= told
    assert {text for text in told if f'"{text}"' not in metrics} == set()


def test_the_samples_are_the_counters_of_the_metrics(engine: RawEngine) -> None:
    wait_until(lambda: figures()["pool"]["blocks"] == 8, "a sample after the store", 30)
    said = figures()
    last = dict(zip(said["columns"], said["samples"][-1], strict=True))
    counted = dict(re.findall(r"^(kvd_\w+) ([\d.e+]+)$", get("/metrics")[1], re.MULTILINE))
    assert last["stored"] == float(counted["kvd_stored_bytes_total"]) > 0
    assert last["loaded"] == float(counted["kvd_loaded_bytes_total"]) > 0
    assert last["evicted"] == float(counted["kvd_evicted_blocks_total"])
    assert said["pool"]["bytes"] == float(counted["kvd_pool_bytes"])
    assert said["sessions"] == float(counted["kvd_sessions"]) == 1
    assert said["state"] == "ready"


def test_the_page_may_run_its_own_script_alone_and_ask_nobody_else(engine: RawEngine) -> None:
    headers, page = get("/status")
    policy = dict(
        part.strip().partition(" ")[::2] for part in headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert set(re.findall(r"(?:https?:)?//[\w.]+", page)) == {"http://www.w3.org"}  # SVG's name
    assert " style=" not in page
    assert " onclick=" not in page
    assert "innerHTML" not in page
    assert get("/status/figures")[0]["Cache-Control"] == "no-store"


def test_a_setting_takes_the_page_away_and_leaves_the_metrics() -> None:
    port = free_port()
    with daemon("--http-port", str(port), "--status-page=false"):
        for path in ("/status", "/status/figures"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get(path, port)
        assert "kvd_build_info" in get("/metrics", port)[1]


def machine() -> Machine:
    return Machine(MachineConfig(extents=4, extent_bytes=1 << 22, tag_secret=bytes(16)))


class Looked:
    """A clock, and how often the machine's figures were gathered; each time takes so long."""

    def __init__(self, seconds: float) -> None:
        self.clock = 100.0
        self.times = 0
        self._seconds = seconds
        self._machine = machine()

    def sources(self) -> Sources:
        def gather() -> Any:
            self.times += 1
            self.clock += self._seconds
            return self._machine.statistics()

        return Sources(gather, lambda: (), lambda: (), lambda: "ready")


def test_any_number_of_open_pages_gathers_nothing() -> None:
    looked = Looked(0.001)
    page = StatusPage("1", lambda: looked.clock)
    page._sources = looked.sources()
    page.sample()
    answers = {page.figures() for _ in range(1000)}
    assert len(answers) == 1
    assert looked.times == 1


@pytest.mark.parametrize(("seconds", "every"), [(0.0, 5.0), (0.02, 5.0), (0.05, 10.0), (1, 200.0)])
def test_samples_that_take_long_are_fewer(seconds: float, every: float) -> None:
    looked = Looked(seconds)
    page = StatusPage("1", lambda: looked.clock)
    page._sources = looked.sources()
    assert page.sample() == pytest.approx(every)
    assert every == max(SAMPLE_SECONDS, seconds / SAMPLE_SHARE)


def test_a_quarter_of_an_hour_is_kept_and_no_more() -> None:
    looked = Looked(0.0)
    page = StatusPage("1", lambda: looked.clock)
    page._sources = looked.sources()
    for _ in range(MAX_SAMPLES + 3):
        page.sample()
        looked.clock += SAMPLE_SECONDS
    _, _, content = page.figures()
    ats = [row[0] for row in json.loads(content)["samples"]]
    assert len(ats) == MAX_SAMPLES
    assert ats[-1] - ats[0] == 900
    assert len(content) < 64 << 10


def test_tables_are_bounded_and_say_how_many_are_left_out() -> None:
    from kvd.core import events as ev
    from kvd.core.keys import TenantId

    whole = machine()
    for number in range(MAX_ROWS_SHOWN + 2):
        whole.handle(ev.QuotaSet(number, TenantId(f"t{number:03}"), 1 << 20), 0)
    page = StatusPage("1")
    page._sources = Sources(whole.statistics, lambda: (), lambda: (), lambda: "ready")
    said = json.loads(page.figures()[2])
    assert (len(said["tenants"]), said["tenants_left"]) == (MAX_ROWS_SHOWN, 2)


async def test_samples_that_end_by_an_error_are_told() -> None:
    from kvd.cli.serve import _tell_of_end

    told: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))

    def broken() -> Any:
        raise AssertionError("an invariant")

    sampling = asyncio.ensure_future(
        StatusPage("1").keep(Sources(broken, lambda: (), lambda: (), lambda: "ready"))
    )
    sampling.add_done_callback(partial(_tell_of_end, "the status page"))
    await asyncio.wait([sampling])
    await asyncio.sleep(0)
    assert [str(error) for error in told] == ["an invariant"]


def test_before_the_daemon_serves_the_page_says_that_it_starts() -> None:
    said = json.loads(StatusPage("1").figures()[2])
    assert (said["state"], said["samples"]) == ("starting", [])


# -- in a browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown(engine: RawEngine) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    wait_until(lambda: len(figures()["samples"]) >= 2, "two samples", 30)
    with browser() as opened:
        opened.open(f"http://localhost:{PORT}/status")
        opened.wait("document.querySelector('#throughput svg') !== null", "the plot")
        yield opened


def text(shown: Browser, element: str) -> str:
    return str(shown.value(f"document.getElementById({json.dumps(element)}).textContent"))


@wants_a_browser
def test_a_browser_shows_what_the_daemon_tells(shown: Browser) -> None:
    said = figures()
    assert text(shown, "state") == "ready"
    assert text(shown, "sessions") == "1"
    assert "of 32.0 MiB" in text(shown, "used-of")
    assert text(shown, "blocks") == f"{said['pool']['blocks']} readable blocks"
    assert BAD_NAME in text(shown, "tenants")
    assert "host-shm" in text(shown, "ranks")
    assert shown.value("document.querySelector('#throughput .dot, #throughput .curve') !== null")
    shown.wait("told.samples.length >= 3", "a line's second point")
    for plot in ("throughput", "pool"):
        assert shown.value(f"document.querySelector('#{plot} svg .curve').getTotalLength() > 20")


@wants_a_browser
def test_a_tenants_name_is_text_and_nothing_else(shown: Browser) -> None:
    assert shown.value("document.querySelectorAll('main img').length") == 0
    assert shown.complaints == []


@wants_a_browser
def test_the_page_asks_its_own_daemon_alone_and_at_a_slow_rate(shown: Browser) -> None:
    asked = [url for url in shown.asked if not url.startswith("data:")]
    assert {url.partition("/status")[0] for url in asked} == {f"http://localhost:{PORT}"}
    looks = (
        "performance.getEntriesByType('resource').filter((e) => e.name.endsWith('figures'))"
        ".map((each) => each.startTime)"
    )
    shown.wait(f"{looks}.length >= 2", "another look")
    gaps = [later - sooner for sooner, later in pairwise(shown.value(looks))]
    assert min(gaps) > 900 * SAMPLE_SECONDS


@wants_a_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_is_light_or_dark_as_its_reader_prefers(
    shown: Browser, dark: bool, tmp_path: Path
) -> None:
    shown.look(dark=dark)
    paper, ink = (
        sum(int(part) for part in re.findall(r"\d+", str(shown.value(f"getComputedStyle({of})"))))
        for of in ("document.body).backgroundColor + (''", "document.body).color + (''")
    )
    assert (paper < ink) is dark
    shown.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


@wants_a_browser
def test_it_fits_a_narrow_window(shown: Browser) -> None:
    shown.look(dark=False, width=420, height=900)
    shown.wait("document.querySelector('#curve').clientWidth < 420", "the new width")
    assert shown.value("document.documentElement.scrollWidth <= 421")


@wants_a_browser
def test_words_under_a_plot_do_not_overlap_on_a_telephone(shown: Browser) -> None:
    shown.look(dark=False, width=360, height=900)
    shown.wait("document.querySelector('#curve').clientWidth < 360", "the new width")
    shown.value("dispatchEvent(new Event('resize'))")
    overlapping = (
        "[...document.querySelectorAll('svg')].flatMap((svg) => {"
        " const low = Math.max(...[...svg.querySelectorAll('text')].map((t) => t.getBBox().y));"
        " const boxes = [...svg.querySelectorAll('text')].map((t) => t.getBBox())"
        ".filter((box) => box.y > low - 4).sort((a, b) => a.x - b.x);"
        " return boxes.slice(1).filter((box, i) => boxes[i].x + boxes[i].width > box.x); }).length"
    )
    assert shown.value("document.querySelectorAll('svg').length") >= 3
    shown.wait(f"{overlapping} === 0", "words that stand apart")


@wants_a_browser
def test_the_figures_under_the_pointer_are_told(shown: Browser) -> None:
    shown.look(dark=False)
    shown.value("dispatchEvent(new Event('resize'))")
    place = (
        "(() => { const b = document.querySelector('#pool svg').getBoundingClientRect();"
        " return [b.right - 12, b.top + 80]; })()"
    )

    def told() -> bool:
        x, y = shown.value(place)
        shown.point(x - 1, y)
        shown.point(x, y)
        return bool(shown.value("!document.querySelector('#pool .tip').hidden"))

    wait_until(told, f"the figures; {shown.value(place)}, {shown.value('innerHeight')}", 60)
    shown.value("show()")
    assert shown.value("!document.querySelector('#pool .tip').hidden"), "new figures take it away"
    assert "readable" in str(shown.value("document.querySelector('#pool .tip').textContent"))


@wants_a_browser
def test_a_daemon_that_has_gone_is_told_and_its_figures_stay() -> None:
    port = free_port()
    with browser() as opened:
        with daemon("--http-port", str(port)):
            opened.open(f"http://localhost:{port}/status")
            opened.wait("document.getElementById('state').textContent === 'ready'", "the state")
        opened.value("look()")
        opened.wait("!document.getElementById('banner').hidden", "the banner")
        assert "does not answer" in text(opened, "banner")
        assert __version__ in text(opened, "who")


def test_the_file_is_in_the_package() -> None:
    assert status_page.html().startswith("<!doctype html>")
