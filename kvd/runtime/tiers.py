"""The secondary tiers: their processes carry out what the core orders, and it hears of the end."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import re
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import or_
from typing import NamedTuple, assert_never

import numpy as np
import numpy.typing as npt

from kvd.config.settings import MAX_TENANTS
from kvd.config.tiers import KINDS, TierRule
from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.events import Event
from kvd.core.keys import MoverId, NamespaceId, RowId, ScopeName, TenantId, TierId
from kvd.core.model.tiers import Reach, TierTerms, WriteWhen
from kvd.core.upkeep.statistics import Statistics, TierFigures
from kvd.pool.generations import EVERY, NAME_BYTES, bits_of
from kvd.pool.pool import Pool
from kvd.runtime import damage
from kvd.tiers.keeper import TierKeeper
from kvd.tiers.process import (
    OrderEnd,
    OrderId,
    PlacedBlocks,
    ScopedKeys,
    TierAnswer,
    TierConfig,
    TierLeft,
    TierProcess,
)
from kvd.tiers.store import SCOPE_BYTES, Found, Outcome, TierUsage

log = logging.getLogger(__name__)

# Of the pool's blocks, on their way to one tier: they can't be evicted meanwhile.
MAX_WRITE_BYTES = 1 << 30
WRITE_SHARE = 4  # 1/4 of the pool at most
MAX_SCOPE_NAMES = 65_536  # of which a tier may name what has left it
MAX_DELETIONS = 4096  # namespaces that one tier has yet to delete; beyond it deletes all it holds
LAYOUT_VERSION = 1  # of a block's bytes in a slot, as tiers keep them
NO_USAGE = TierUsage(0, 0, 0)
TierOrder = act.AskTier | act.WriteToTier | act.ReadFromTier | act.ClearTier
Asked = act.AskTier | act.WriteToTier | act.ReadFromTier
DOUBTED_AGAIN_S = 10.0  # between two doubts about all that a tier holds
DELETE_AGAIN_S = 1.0  # after a tier could not delete all of it
# Options of our stores that say how one is used: where these are others, it is the same store.
_SAYS_HOW = re.compile(r"threads|calls|retries|replicas|\w+_(seconds|file)")
SOON_S = 0.002  # that a lookup waits for a tier's answer, where its tenant's last came as fast


def terms_of(rules: Sequence[TierRule], pool_bytes: int) -> tuple[TierTerms, ...]:
    """What the core has to know of the tiers."""
    return tuple(
        TierTerms(
            rule.name,
            Reach.CLUSTER if rule.medium == "REMOTE" else Reach.DISK,
            WriteWhen[rule.write.upper()],
            rule.reuse,
            seek_ns=int(rule.deadline_seconds * 1e9),
            max_write_bytes=min(MAX_WRITE_BYTES, pool_bytes // WRITE_SHARE),
        )
        for rule in rules
    )


class Deletion(NamedTuple):
    """What a tier shall delete."""

    order: OrderId
    name: bytes  # that the scopes begin with, EVERY for all
    fingerprint: str  # of the namespace, where the core waits for the end
    again: bool = False  # it was not done the first time


class Question(NamedTuple):
    """What a tier was asked and has not answered."""

    tier: TierId
    tenant: str
    asked_s: float
    waiting: list[asyncio.Future[None]]


class TierTold(NamedTuple):
    """What is known of one tier's process."""

    problem: str  # why there is none, or was none before
    short_lives: int  # of its processes, in a row
    usage: TierUsage
    undeleted: int  # namespaces that are hidden until it has deleted them
    is_hidden: bool  # every one is


class Tiers:
    """Every tier of this daemon. Lives on the event loop; listens to their processes."""

    def __init__(
        self,
        rules: Sequence[TierRule],
        pool: Pool,
        fingerprint_of: Callable[[NamespaceId], str],
        tenant_of: Callable[[NamespaceId], TenantId | None],
        report: Callable[[Event | asyncio.Future[None]], None],
        allocate_mover: Callable[[], MoverId],
    ) -> None:
        self.usage: dict[TierId, TierUsage] = {}
        self._rules = tuple(rules)
        self._pool = pool
        self._fingerprint_of = fingerprint_of
        self._tenant_of = tenant_of
        self._report = report
        self._allocate_mover = allocate_mover
        self._keepers: list[TierKeeper] = []
        self._movers: dict[MoverId, TierId] = {}  # as which their processes map rows
        each = [TierId(place) for place in range(len(self._rules))]
        self._asked: dict[TierId, dict[OrderId, Asked | Deletion]] = {tier: {} for tier in each}
        self._written: set[TierId] = set()  # those that were given a block since they began
        self._doubted: dict[TierId, bool] = {}  # a moment ago, and whether since then again
        self._scope_names: OrderedDict[bytes, ScopeName] = OrderedDict()  # the last used last
        self._deleting: dict[TierId, dict[bytes, Deletion]] = {tier: {} for tier in each}  # by name
        self._next_order = 0
        self.questions = 0  # that processes were given, so far
        self._questions: dict[OrderId, Question] = {}
        # Tenants whose last answer took longer than SOON_S; the last to ask at the end.
        self._slow_for: defaultdict[TierId, dict[str, None]] = defaultdict(dict)

    def begin(self) -> None:
        """Start their processes, and from now on whenever one has ended."""
        for place, rule in enumerate(self._rules):
            tier = TierId(place)
            files, summed = self._pool.extent_files, self._pool.payload_checksums
            config = TierConfig(tier, rule.store, rule.options, files, summed, rule.name)
            self._keepers.append(TierKeeper(config, self._pool, self, rule.bounds))
        generations = self._pool.generations
        generations.begin(self._shared_bits, self._shared_stores)
        for name, bits in generations.unsettled():
            self._unsettle(name, bits)

    async def close(self) -> None:
        """End their processes; returns when they are gone."""
        await asyncio.gather(*(keeper.close() for keeper in self._keepers))

    def scopes_cleared(self, namespace: NamespaceId) -> None:
        """What any store holds of the namespace is found no longer, nor by another daemon."""
        generations = self._pool.generations
        name = _namespace_name(self._fingerprint_of(namespace))
        before = generations.of_all
        if generations.clear(name, unsettled=self._shared_bits) == EVERY:
            self._unsettle(EVERY, self._shared_bits)
        if generations.of_all != before:
            self._all_are_renamed()

    def all_cleared(self) -> None:
        """Likewise of every namespace, of those too that are forgotten here."""
        self._pool.generations.clear_all(unsettled=self._shared_bits)
        self._scope_names.clear()
        for tier in self._deleting:
            self._delete(tier, EVERY)

    def _all_are_renamed(self) -> None:
        """Nobody finds what stores of this node hold, of namespaces too that were not cleared."""
        self._scope_names.clear()  # what leaves under a former name is not what has it now
        for tier in self._deleting:
            if not self._is_shared(tier):
                self._doubt(tier)

    def _unsettle(self, name: bytes, bits: int) -> None:
        """Stores with any of these bits are not asked for it until they have deleted it."""
        for tier in self._shared:
            if self._bits(tier) & bits:
                self._delete(tier, name)

    def _bits(self, tier: TierId) -> int:
        rule = self._rules[tier]
        return bits_of(rule.name, _place_of(rule))

    @property
    def _shared_bits(self) -> int:
        """Of the stores that nodes share, which have to delete what is cleared."""
        return functools.reduce(or_, map(self._bits, self._shared), 0)

    @property
    def _shared_stores(self) -> bytes:
        """Which these are."""
        rules = [self._rules[tier] for tier in self._shared]
        which = sorted((rule.name, _place_of(rule)) for rule in rules)
        return hashlib.blake2b(repr(which).encode(), digest_size=NAME_BYTES).digest()

    @property
    def _shared(self) -> list[TierId]:
        return [tier for tier in self._deleting if self._is_shared(tier)]

    def _is_shared(self, tier: TierId) -> bool:
        return self._rules[tier].medium == "REMOTE"

    def told(self) -> list[TierTold]:
        """What is known of each tier's process, in their order."""
        return [self._told_of(TierId(place)) for place in range(len(self._rules))]

    def _told_of(self, tier: TierId) -> TierTold:
        hidden = self._deleting[tier] if self._is_shared(tier) else {}
        return TierTold(
            self._keepers[tier].problem if self._keepers else "",
            self._keepers[tier].short_lives if self._keepers else 0,
            self.usage.get(tier, NO_USAGE),
            0 if EVERY in hidden else len(hidden),
            EVERY in hidden,
        )

    def seen(self, figures: Statistics) -> Statistics:
        """The figures, what stores say of failures, and that a tier whose process has yet to end
        is served by none.

        The core waits for that end: copies may run until then. It may take as long as a disk hangs.
        """
        if not self._keepers:
            return figures
        tiers: list[TierFigures] = []
        for place, (tier, keeper) in enumerate(zip(figures.tiers, self._keepers, strict=True)):
            told = self.usage.get(TierId(place), NO_USAGE).errors
            errors = {str(reason): count for reason, count in told.items()}
            serves = tier.is_serving and not keeper.is_ending
            tiers.append(replace(tier, is_serving=serves, errors=errors))
        return replace(figures, tiers=tuple(tiers))

    def _process_of(self, tier: TierId) -> TierProcess | None:
        """None while there is none: calls come before `begin`, too."""
        return self._keepers[tier].process if self._keepers else None

    def maps_as(self, mover: MoverId) -> bool:
        """Whether rows that this mover maps are mapped by a tier's process."""
        return mover in self._movers

    # -- orders -----------------------------------------------------------------------------

    def carry_out(self, order: TierOrder) -> None:
        """Pass an order on; what the process doesn't take is answered at once."""
        if isinstance(order, act.ClearTier):
            self._delete(order.tier, _namespace_name(order.fingerprint), order.fingerprint)
            return
        process = self._process_of(order.tier)
        self._next_order += 1
        number = OrderId(self._next_order)
        if self._is_hidden(order.tier, order.name.namespace):
            self._tell_none(order, refused=True)
            return
        if process is not None and self._give(process, number, order):
            self._asked[order.tier][number] = order
            if isinstance(order, act.AskTier):
                self.questions += 1
                tenant = self._tenant_of(order.name.namespace) or ""
                self._questions[number] = Question(order.tier, tenant, time.monotonic(), [])
            if isinstance(order, act.WriteToTier) and order.tier not in self._written:
                self._written.add(order.tier)
                self._tell_clients()
        else:
            self._tell_none(order, refused=True)

    def may_answer_soon(self, tenant: str) -> bool:
        """Whether the tenant's lookup may wait for an answer: not of those slow for it, or none."""
        return any(
            self._process_of(tier) is not None and tenant not in self._slow_for[tier]
            for tier in self._asked
        )

    async def answered_soon(self) -> bool:
        """Wait a moment for the answer to what was asked last. False: it has not come.

        Nobody waits for a tier whose last answer to the tenant took longer than such a moment.
        """
        question = next(reversed(self._questions.values()), None)
        if question is None:
            return True
        if question.tenant in self._slow_for[question.tier]:
            return False
        answered = asyncio.get_running_loop().create_future()
        question.waiting.append(answered)
        await asyncio.wait([answered], timeout=SOON_S)
        if not answered.done():
            answered.cancel()
            self._note_pace(question, is_slow=True)
            return False
        return True

    def _note_pace(self, question: Question, *, is_slow: bool) -> None:
        slow_for = self._slow_for[question.tier]
        slow_for.pop(question.tenant, None)
        if is_slow:
            slow_for[question.tenant] = None
        if len(slow_for) > MAX_TENANTS:  # some of them are forgotten since
            del slow_for[next(iter(slow_for))]

    def _note_answer(self, order: OrderId) -> None:
        """After its event was reported: who waits for it goes on when that was handled."""
        question = self._questions.pop(order, None)
        if question is not None:
            self._note_pace(question, is_slow=time.monotonic() - question.asked_s > SOON_S)
            for waiting in question.waiting:
                self._report(waiting)

    def _delete(
        self, tier: TierId, name: bytes, fingerprint: str = "", *, again: bool = False
    ) -> None:
        """Have all of it deleted, by this process or the next, again and again until that is done.

        Nobody finds it meanwhile: in a store of this node it has another name, and one that nodes
        share is not asked for it.
        """
        is_new = name != EVERY and name not in self._deleting[tier]
        if is_new and len(self._deleting[tier]) >= MAX_DELETIONS:
            self._delete_every(tier, fingerprint)
            return
        self._next_order += 1
        number = OrderId(self._next_order)
        deletion = Deletion(number, name, fingerprint, again)
        self._deleting[tier][name] = deletion
        process = self._process_of(tier)
        if process is None:
            return
        deadline = time.monotonic() + self._rules[tier].deadline_seconds
        if process.delete_scopes(number, (name,), deadline):
            self._asked[tier][number] = deletion
        else:
            self._delete_later(tier, deletion)

    def _delete_every(self, tier: TierId, fingerprint: str) -> None:
        """Have all of the tier deleted in place of so many namespaces one by one.

        The core need not wait for each: what is cleared is not found meanwhile.
        """
        waited_for = [deletion.fingerprint for deletion in self._deleting[tier].values()]
        self._deleting[tier].clear()
        self._delete(tier, EVERY, again=True)
        for each in filter(None, (*waited_for, fingerprint)):
            self._report(ev.TierCleared(tier, each))

    def _delete_later(self, tier: TierId, deletion: Deletion) -> None:
        asyncio.get_running_loop().call_later(DELETE_AGAIN_S, self._delete_again, tier, deletion)

    def _delete_again(self, tier: TierId, deletion: Deletion) -> None:
        if self._deleting[tier].get(deletion.name) is deletion:
            self._delete(tier, deletion.name, deletion.fingerprint, again=True)

    def _is_hidden(self, tier: TierId, namespace: NamespaceId) -> bool:
        """Whether a store that nodes share may still hold what was cleared."""
        deleting = self._deleting[tier]
        if not deleting or not self._is_shared(tier):
            return False
        return EVERY in deleting or _namespace_name(self._fingerprint_of(namespace)) in deleting

    def _give(self, process: TierProcess, number: OrderId, order: Asked) -> bool:
        deadline = time.monotonic() + self._rules[order.tier].deadline_seconds
        scope = self._scope(order.tier, order.name)
        tenant = self._tenant_of(order.name.namespace) or ""
        match order:
            case act.AskTier():
                return process.exists(number, (ScopedKeys(scope, order.keys),), deadline, tenant)
            case act.WriteToTier():
                placed = (self._placed(scope, order),)
                return process.write(number, placed, deadline, tenant, again=order.again)
            case act.ReadFromTier():
                if not self._pool.has(order.slots):
                    return False  # a row that the pool had no memory for
                return process.read(number, (self._placed(scope, order),), deadline, tenant)
            case _:
                assert_never(order)

    def _placed(self, scope: bytes, order: act.WriteToTier | act.ReadFromTier) -> PlacedBlocks:
        part_bytes = self._pool.part_bytes(order.slots)
        located = [self._pool.locate(order.slots, shard) for shard in range(len(part_bytes))]
        extents = np.stack([extents for extents, _ in located])
        offsets = np.stack([offsets for _, offsets in located])
        sums = None
        if isinstance(order, act.WriteToTier):
            shards = range(len(part_bytes))
            kept = [self._pool.checksums(order.slots, shard) for shard in shards]
            of_shards = [each for each in kept if each is not None]
            sums = np.stack(of_shards) if of_shards else None
        return PlacedBlocks(scope, order.keys, extents, offsets, part_bytes, sums)

    def _scope(self, tier: TierId, name: ScopeName) -> bytes:
        """The digest by which a tier knows the scope, over all incarnations of the pool.

        Nodes that share a store call the scope alike, whatever each of them cleared.
        """
        size = SCOPE_BYTES - NAME_BYTES
        digest = hashlib.blake2b(digest_size=size, person=b"kvd-tier-scope")
        namespace = _namespace_name(self._fingerprint_of(name.namespace))
        generation = (0, 0) if self._is_shared(tier) else self._pool.generations.of(namespace)
        numbers = (name.group, *generation, LAYOUT_VERSION)
        for text in (name.epoch, name.account, *map(str, numbers)):
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(4, "little") + encoded)
        scope = namespace + digest.digest()
        self._scope_names[scope] = name
        self._scope_names.move_to_end(scope)
        if len(self._scope_names) > MAX_SCOPE_NAMES:
            self._scope_names.popitem(last=False)
        return scope

    def unmap_row(self, order: act.UnmapRow) -> None:
        """Have a tier's process unmap the row once no copy uses it."""
        process = self._keepers[self._movers[order.mover]].process
        extents = self._pool.extents_of_row(order.row)
        if process is None or not process.unmap_row(order.row, extents):
            self._report(ev.RowUnmapped(order.mover, order.row))

    def _tell_none(self, order: Asked, *, refused: bool) -> None:
        """Nothing came of it, and nothing was learned of its blocks."""
        nothing = np.zeros(len(order.keys), dtype=np.bool_)
        if isinstance(order, act.AskTier):
            failed = not refused
            self._report(ev.TierAnswered(order.tier, order.search, nothing, refused, failed))
        else:
            self._report(ev.TierCopyEnded(order.tier, order.copy, nothing, refused=refused))

    # -- what processes say (TierListener) ----------------------------------------------------

    def tier_started(self, tier: TierId, process: TierProcess) -> None:  # noqa: ARG002
        """From now on it is asked, written and read."""
        mover = self._allocate_mover()
        self._movers[mover] = tier
        self._report(ev.TierStarted(tier, mover))
        for deletion in list(self._deleting[tier].values()):
            self._delete(tier, deletion.name, deletion.fingerprint, again=deletion.again)

    def order_ended(self, tier: TierId, answer: TierAnswer) -> None:
        """The core hears what became of each block."""
        order = self._asked[tier].pop(answer.order, None)
        if order is not None:
            self._tell_end(tier, order, answer)
            self._note_answer(answer.order)

    def _tell_end(self, tier: TierId, order: Asked | Deletion, answer: TierAnswer) -> None:
        if isinstance(order, Deletion):
            self._deletion_ended(tier, order, answer)
        elif answer.end is not OrderEnd.ANSWERED:
            self._tell_none(order, refused=False)
        elif isinstance(order, act.AskTier):
            held, unknown = _is(answer, Found.THERE), _is(answer, Found.UNKNOWN)
            self._report(ev.TierAnswered(tier, order.search, held, unknown=unknown))
        else:
            self._note_sums(order, answer)
            damaged = _is(answer, Outcome.DAMAGED)
            if damaged.any():
                damage.log_damage(self._pool, order.slots[damaged], order.name.namespace)
            done, missing = _is(answer, Outcome.DONE), _is(answer, Outcome.MISSING)
            self._report(ev.TierCopyEnded(tier, order.copy, done, damaged, missing=missing))

    def _note_sums(self, order: act.WriteToTier | act.ReadFromTier, answer: TierAnswer) -> None:
        """What came from a tier is compared with these when it is loaded."""
        sums = answer.sums.reshape(len(order.slots), -1)
        for shard in range(sums.shape[1]):
            self._pool.note_checksums(order.slots, shard, sums[:, shard])

    def _deletion_ended(self, tier: TierId, deletion: Deletion, answer: TierAnswer) -> None:
        deleting = self._deleting[tier]
        if deleting.get(deletion.name) is not deletion:
            return  # it is deleted once more
        if answer.end is not OrderEnd.ANSWERED:
            self._delete_later(tier, deletion)
            return
        del deleting[deletion.name]
        if deletion.again and deletion.name == EVERY:
            self._doubt(tier)  # it took along what was written meanwhile
        if deletion.fingerprint:
            self._report(ev.TierCleared(tier, deletion.fingerprint))
        if self._is_shared(tier):
            self._settle(tier, deletion.name)

    def _settle(self, tier: TierId, name: bytes) -> None:
        """A store that nodes share holds nothing of it any more; with EVERY, of no name but those
        that it has yet to delete: else the next daemon has what is stored from now on deleted."""
        generations = self._pool.generations
        names = [name]
        if name == EVERY:
            left = (each for each, _ in generations.unsettled())
            names += [each for each in left if each and each not in self._deleting[tier]]
        for each in names:
            others = [o for o in self._shared if self._deleting[o].keys() & {each, EVERY}]
            theirs = functools.reduce(or_, map(self._bits, others), 0)
            generations.settle(each, self._bits(tier) & ~theirs)

    def row_unmapped(self, tier: TierId, row: RowId) -> None:
        """The process no longer maps the row."""
        for mover, served in self._movers.items():
            if served == tier:
                self._report(ev.RowUnmapped(mover, row))

    def usage_told(self, tier: TierId, usage: TierUsage) -> None:
        """Where a tier holds anything, a block that index pages don't show may be there."""
        self.usage[tier] = usage
        self._tell_clients()

    def left_told(self, tier: TierId, left: TierLeft) -> None:
        """The core hears of what has left, as far as anybody here knows the scope."""
        if left.in_doubt:
            self._doubt(tier)
        for part in left.parts:
            name = self._scope_names.get(part.scope)
            if name is not None:
                self._report(ev.TierForgot(tier, name, part.keys))

    def _doubt(self, tier: TierId) -> None:
        """The core goes over all that it knows of the tier: not for each word of a store."""
        if tier in self._doubted:
            self._doubted[tier] = True
            return
        self._doubted[tier] = False
        asyncio.get_running_loop().call_later(DOUBTED_AGAIN_S, self._doubt_again, tier)
        self._report(ev.TierDoubted(tier))

    def _doubt_again(self, tier: TierId) -> None:
        if self._doubted.pop(tier) and self._process_of(tier) is not None:
            self._doubt(tier)

    def tier_gone(self, tier: TierId, reason: str) -> None:  # noqa: ARG002 - its keeper logs it
        """None of its copies runs any more."""
        self.usage.pop(tier, None)
        self._written.discard(tier)
        asked = [self._questions.pop(order, None) for order in self._asked[tier]]
        self._asked[tier].clear()
        self._movers = {mover: other for mover, other in self._movers.items() if other != tier}
        self._report(ev.TierGone(tier))
        for question in filter(None, asked):  # no answer comes any more
            for waiting in question.waiting:
                self._report(waiting)
        self._tell_clients()

    def _tell_clients(self) -> None:
        """Other nodes write to what nodes share: it always may hold something."""
        holds_some = bool(self._written) or any(
            usage.blocks or self._is_shared(tier) for tier, usage in self.usage.items()
        )
        self._pool.set_below(holds_some=holds_some)


def _place_of(rule: TierRule) -> str:
    """Where its store is. Of a site's own nobody knows which options say that: all count."""
    options = sorted(rule.options.items())
    if rule.store in KINDS.values():
        options = [each for each in options if not _SAYS_HOW.fullmatch(each[0])]
    return repr((rule.store, options))


def _namespace_name(fingerprint: str) -> bytes:
    """What every scope of the namespace begins with."""
    digest = hashlib.blake2b(digest_size=NAME_BYTES, person=b"kvd-tier-names")
    digest.update(fingerprint.encode())
    return digest.digest()


def _is(answer: TierAnswer, value: int) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = answer.values == value
    return found
