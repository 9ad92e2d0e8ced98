"""Made-up traffic of different kinds, for policies to be compared on: the same at every call.

None of it was taken from a trace. Sizes are in blocks of 512 tokens, and a block's number stands
for it and all before it, as in traces. Parameters are round numbers that were chosen once, for
each kind to be what its name says, and not by what a policy finds there.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvd.cli.replay.trace import TraceRequest

BLOCK_TOKENS = 512
SECONDS = 1000  # times are in milliseconds

Prompt = list[int]


@dataclass
class Texts:
    """Numbers of blocks: of the same text behind the same prompt the same ones."""

    _known: dict[tuple[int, int, int], int] = field(default_factory=dict)
    _last: int = 0

    def fresh(self, prompt: Prompt, blocks: int) -> Prompt:
        """The prompt, and so many blocks that never were before."""
        self._last += blocks
        return [*prompt, *range(self._last - blocks + 1, self._last + 1)]

    def behind(self, prompt: Prompt, text: int, blocks: int) -> Prompt:
        """The prompt, and a text of so many blocks."""
        before, grown = (prompt[-1] if prompt else 0), list(prompt)
        for at in range(blocks):
            key = (before, text, at)
            if key not in self._known:
                self._last += 1
                self._known[key] = self._last
            before = self._known[key]
            grown.append(before)
        return grown


@dataclass
class Traffic:
    """A random source, its texts, and the requests so far."""

    seed: int
    texts: Texts = field(default_factory=Texts)
    _requests: list[tuple[float, int, Prompt]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def ask(self, at: float, prompt: Prompt) -> None:
        """A request at so many milliseconds."""
        self._requests.append((at, len(self._requests), prompt))

    def arrivals(self, count: int, every: float, start: float = 0.0) -> Iterator[float]:
        """Times of requests that don't know of each other."""
        at = start
        for _ in range(count):
            at += float(self.rng.exponential(every))
            yield at

    def size(self, median: float, spread: float, most: int) -> int:
        """Log-normal, at least one."""
        drawn = float(self.rng.lognormal(math.log(median), spread))
        return int(min(max(1, round(drawn)), most))

    def pauses(self, median: float, spread: float, most: int) -> Callable[[], float]:
        """Draws milliseconds from log-normal seconds, one at least."""
        return lambda: self.size(median, spread, most) * float(SECONDS)

    def popular(self, count: int, slope: float) -> Callable[[], int]:
        """Draws numbers below `count` by Zipf's law."""
        chances = 1 / np.arange(1, count + 1) ** slope
        upto = np.cumsum(chances / chances.sum())
        return lambda: min(int(np.searchsorted(upto, self.rng.random())), count - 1)

    def session(
        self, start: float, prompt: Prompt, goes_on: float, pause: Callable[[], float], grows: float
    ) -> None:
        """Turns that each have all before them; another comes with such a chance."""
        at = start
        while True:
            prompt = self.texts.fresh(prompt, self.size(grows, 0.8, 100))
            self.ask(at, prompt)
            if self.rng.random() >= goes_on or len(prompt) > 600:
                return
            at += pause()

    def trace(self) -> list[TraceRequest]:
        """All requests, in order of time."""
        heapq.heapify(self._requests)
        ordered = [heapq.heappop(self._requests) for _ in range(len(self._requests))]
        return [
            TraceRequest(int(at), BLOCK_TOKENS * len(prompt), 100, np.array(prompt, np.int64))
            for at, _, prompt in ordered
        ]


def documents() -> list[TraceRequest]:
    """Documents asked about at random, some more often than others, one question a request."""
    traffic = Traffic(1)
    draw = traffic.popular(1500, 0.8)
    sizes = [traffic.size(15, 0.8, 200) for _ in range(1500)]
    for at in traffic.arrivals(8000, 2 * SECONDS):
        number = draw()
        prompt = traffic.texts.behind([], number, sizes[number])
        traffic.ask(at, traffic.texts.fresh(prompt, 1))
    return traffic.trace()


def scan() -> list[TraceRequest]:
    """Documents asked about at random, and for a third of the time a job reads new ones, once."""
    traffic = Traffic(2)
    draw = traffic.popular(600, 0.6)
    for at in traffic.arrivals(6000, 2 * SECONDS):
        prompt = traffic.texts.behind([], draw(), 12)
        traffic.ask(at, traffic.texts.fresh(prompt, 1))
    for at in traffic.arrivals(2000, 2 * SECONDS, start=4000 * SECONDS):
        traffic.ask(at, traffic.texts.fresh([], traffic.size(30, 0.3, 100)))
    return traffic.trace()


def agents() -> list[TraceRequest]:
    """Agents of a few kinds that pause for tools: mostly for seconds, sometimes for minutes."""
    traffic = Traffic(3)

    short, long = traffic.pauses(6, 1.0, 7200), traffic.pauses(240, 1.0, 7200)

    def pause() -> float:
        return long() if traffic.rng.random() < 0.15 else short()

    for start in traffic.arrivals(400, 40 * SECONDS):
        kind = int(traffic.rng.integers(5))
        prompt = traffic.texts.behind([], kind, 12)
        traffic.session(start, prompt, 0.95, pause, 3)
    return traffic.trace()


def retrieval() -> list[TraceRequest]:
    """Questions behind a system prompt and a few passages that were found for them."""
    traffic = Traffic(4)
    draw = traffic.popular(400, 1.0)
    for at in traffic.arrivals(9000, SECONDS):
        prompt = traffic.texts.behind([], 10_000, 4)
        for _ in range(int(traffic.rng.integers(1, 4))):
            prompt = traffic.texts.behind(prompt, draw(), 3)
        traffic.ask(at, traffic.texts.fresh(prompt, 1))
    return traffic.trace()


def tenants() -> list[TraceRequest]:
    """Several at once: people who chat, agents, documents, and a batch of one-off prompts."""
    traffic = Traffic(5)

    minutes, seconds = traffic.pauses(60, 1.0, 7200), traffic.pauses(5, 0.8, 600)
    for start in traffic.arrivals(900, 12 * SECONDS):
        traffic.session(start, traffic.texts.behind([], 1, 2), 0.6, minutes, 3)
    for start in traffic.arrivals(120, 90 * SECONDS):
        traffic.session(start, traffic.texts.behind([], 2, 20), 0.93, seconds, 4)
    draw = traffic.popular(200, 0.9)
    for at in traffic.arrivals(2500, 4 * SECONDS):
        prompt = traffic.texts.behind([], 100 + draw(), 15)
        traffic.ask(at, traffic.texts.fresh(prompt, 1))
    for at in traffic.arrivals(1500, 7 * SECONDS):
        prompt = traffic.texts.behind([], 3, 5)
        traffic.ask(at, traffic.texts.fresh(prompt, traffic.size(8, 0.5, 60)))
    return traffic.trace()


def spike() -> list[TraceRequest]:
    """People who chat, and for a tenth of the time ten times as many come, who ask once."""
    traffic = Traffic(6)
    pause = traffic.pauses(45, 1.0, 7200)
    system = traffic.texts.behind([], 1, 3)
    for start in traffic.arrivals(1800, 6 * SECONDS):
        traffic.session(start, system, 0.7, pause, 4)
    for start in traffic.arrivals(1800, 0.6 * SECONDS, start=5000 * SECONDS):
        traffic.session(start, system, 0.1, pause, 4)
    return traffic.trace()


def rounds() -> list[TraceRequest]:
    """An evaluation asks the same questions again and again, in the same order; people chat."""
    traffic = Traffic(7)
    pause = traffic.pauses(45, 1.0, 7200)
    sizes = [traffic.size(8, 0.5, 60) for _ in range(400)]
    for number, at in enumerate(traffic.arrivals(4000, 2 * SECONDS)):
        question = number % 400
        traffic.ask(at, traffic.texts.behind([], question, sizes[question]))
    for start in traffic.arrivals(900, 9 * SECONDS):
        traffic.session(start, traffic.texts.behind([], 1000, 3), 0.7, pause, 4)
    return traffic.trace()


def news() -> list[TraceRequest]:
    """Documents that are asked about often while they are new, and hardly ever later."""
    traffic = Traffic(8)
    draw = traffic.popular(1000, 1.1)
    for number, at in enumerate(traffic.arrivals(8000, 2 * SECONDS)):
        newest = 1000 + number // 4
        prompt = traffic.texts.behind([], newest - draw(), 15)
        traffic.ask(at, traffic.texts.fresh(prompt, 1))
    return traffic.trace()


def tools() -> list[TraceRequest]:
    """Sixty tools with long prompts of their own, some called often; most calls end at once."""
    traffic = Traffic(21)
    draw = traffic.popular(60, 1.0)
    sizes = [traffic.size(10, 0.6, 60) for _ in range(60)]
    pause = traffic.pauses(5, 1.2, 600)
    for start in traffic.arrivals(3500, 3 * SECONDS):
        tool = draw()
        prompt = traffic.texts.behind([], tool, sizes[tool])
        traffic.session(start, prompt, 0.45, pause, 2)
    return traffic.trace()


def hours() -> list[TraceRequest]:
    """People who chat, and three times in ten come back after an hour or more."""
    traffic = Traffic(22)

    short, long = traffic.pauses(30, 1.0, 600), traffic.pauses(3600, 0.8, 40_000)

    def pause() -> float:
        return long() if traffic.rng.random() < 0.3 else short()

    for start in traffic.arrivals(1500, 20 * SECONDS):
        traffic.session(start, traffic.texts.behind([], 1, 2), 0.75, pause, 4)
    return traffic.trace()


def samples() -> list[TraceRequest]:
    """Each prompt is asked up to eight times within two seconds; some have a sequel."""
    traffic = Traffic(23)
    for at in traffic.arrivals(1500, 4 * SECONDS):
        system = traffic.texts.behind([], 1, 3)
        prompt = traffic.texts.fresh(system, traffic.size(10, 0.8, 100))
        for number in range(int(traffic.rng.integers(1, 9))):
            traffic.ask(at + number * 200 + float(traffic.rng.random() * 100), prompt)
        if traffic.rng.random() < 0.3:
            later = at + 60 * SECONDS * float(traffic.rng.exponential())
            traffic.ask(later, traffic.texts.fresh(prompt, 3))
    return traffic.trace()


def edits() -> list[TraceRequest]:
    """Programs that are edited: a prompt is the one before, up to a place in its second half."""
    traffic = Traffic(24)
    for start in traffic.arrivals(250, 40 * SECONDS):
        prompt, at = traffic.texts.fresh([], traffic.size(40, 0.6, 200)), start
        traffic.ask(at, prompt)
        while traffic.rng.random() >= 0.05:
            at += traffic.size(8, 1.0, 1800) * SECONDS
            cut = int(len(prompt) * (0.5 + 0.5 * traffic.rng.random()))
            prompt = traffic.texts.fresh(prompt[:cut], len(prompt) - cut + 1)
            traffic.ask(at, prompt)
    return traffic.trace()


def branches() -> list[TraceRequest]:
    """A search in a tree of thoughts: each prompt goes on from any one before in its session."""
    traffic = Traffic(25)
    for start in traffic.arrivals(150, 60 * SECONDS):
        thoughts = [traffic.texts.fresh([], traffic.size(15, 0.5, 80))]
        at = start
        for _ in range(int(traffic.rng.integers(5, 60))):
            before = thoughts[int(traffic.rng.integers(len(thoughts)))]
            thoughts.append(traffic.texts.fresh(before, traffic.size(2, 0.6, 10)))
            traffic.ask(at, thoughts[-1])
            at += float(traffic.rng.exponential(6)) * SECONDS
    return traffic.trace()


def drift() -> list[TraceRequest]:
    """Documents at random, of which two change places now and then, and all of them half-way."""
    traffic = Traffic(26)
    draw = traffic.popular(800, 0.9)
    ranked = traffic.rng.permutation(800)
    for number, at in enumerate(traffic.arrivals(9000, 1.5 * SECONDS)):
        if number % 150 == 0:
            pair = traffic.rng.integers(800, size=2)
            ranked[pair] = ranked[pair[::-1]]
        if number == 4500:
            ranked = traffic.rng.permutation(800)
        document = int(ranked[draw()])
        prompt = traffic.texts.behind([], document, 8 + document % 12)
        traffic.ask(at, traffic.texts.fresh(prompt, 1))
    return traffic.trace()


def examples() -> list[TraceRequest]:
    """A batch whose prompts share one of six sets of examples, one set after the other; a chat."""
    traffic = Traffic(27)
    pause = traffic.pauses(45, 1.0, 7200)
    for at in traffic.arrivals(6000, SECONDS):
        shared = traffic.texts.behind([], 900, 2)
        shared = traffic.texts.behind(shared, int(at / SECONDS // 400) % 6, 18)
        traffic.ask(at, traffic.texts.fresh(shared, traffic.size(2, 0.5, 9)))
    for start in traffic.arrivals(500, 12 * SECONDS):
        traffic.session(start, traffic.texts.behind([], 1000, 3), 0.8, pause, 4)
    return traffic.trace()


def chat_and_documents() -> list[TraceRequest]:
    """People who chat for long, beside documents asked about at random."""
    traffic = Traffic(28)
    draw = traffic.popular(2000, 0.7)
    pause = traffic.pauses(60, 1.2, 7200)
    for start in traffic.arrivals(800, 15 * SECONDS):
        traffic.session(start, traffic.texts.behind([], 1, 4), 0.8, pause, 5)
    for at in traffic.arrivals(4000, 3 * SECONDS):
        document = draw()
        prompt = traffic.texts.behind([], 10 + document, 6 + document % 20)
        traffic.ask(at, traffic.texts.fresh(prompt, 1))
    return traffic.trace()


def uniform() -> list[TraceRequest]:
    """Documents at random, each as often as the others: nothing can be learnt."""
    traffic = Traffic(29)
    for at in traffic.arrivals(7000, 2 * SECONDS):
        document = int(traffic.rng.integers(500))
        prompt = traffic.texts.behind([], document, 6 + document % 20)
        traffic.ask(at, traffic.texts.fresh(prompt, 1))
    return traffic.trace()


def systems() -> list[TraceRequest]:
    """Thousands of applications with short system prompts, and questions that never come again."""
    traffic = Traffic(30)
    draw = traffic.popular(3000, 1.1)
    for at in traffic.arrivals(9000, SECONDS):
        prompt = traffic.texts.behind([], draw(), 3)
        traffic.ask(at, traffic.texts.fresh(prompt, traffic.size(6, 0.8, 60)))
    return traffic.trace()


WORKLOADS: dict[str, Callable[[], list[TraceRequest]]] = {
    each.__name__: each
    for each in (
        *(documents, scan, agents, retrieval, tenants, spike, rounds, news),
        *(tools, hours, samples, edits, branches, drift, examples),
        *(chat_and_documents, uniform, systems),
    )
}
