"""Results of other machines: brought here before a stage is computed, and published after it.

A process that computes holds a claim in the shared store, which it renews. A claim that nobody renews is that of a dead
process, and another one takes it over. Should two processes hold one claim, because one of them slept, both compute the
same result: artifacts have the name of their content, so nothing is harmed but time.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from rlcore.errors import StorageError
from rlcore.tasks.keys.cache_keys import key_of, without_outcome
from rlcore.tasks.store.artifacts import MANIFEST
from rlcore.tasks.store.cache import Record, StageCache
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.shared import RemoteError, SharedStore, open_shared_store

logger = logging.getLogger(__name__)
RENEWED, DEAD = 20.0, 90.0  # seconds between signs of life, and without one
LOOK = 2.0  # seconds between two looks at another process's claim


Publish = Callable[[Record], None]


@contextmanager
def shared_result(stage: str, key: str, home: Home) -> Iterator[Publish]:
    """Bring the results that serve a key here, or claim the key while the block computes.

    The block gets a function that publishes its result. Without a shared store or an answer from it, the block computes
    for this machine alone.
    """
    shared = open_shared_store()
    with ExitStack() as stack:
        try:
            if shared is not None:
                stack.enter_context(_brought_or_claimed(shared, stage, key, home))
        except RemoteError as error:
            logger.warning("%s: %s; going on without it", stage, error.what)
        yield partial(_publish, shared, stage, key, home)


def _publish(shared: SharedStore | None, stage: str, key: str, home: Home, record: Record) -> None:
    try:
        if shared is not None and shared.publish(stage, key, record, home):
            logger.info("%s: published in the shared store", stage)
    except RemoteError as error:
        logger.warning("%s: not published: %s; the next run of this preset publishes it", stage, error.what)


def shared_records(stage: str, key: str) -> tuple[Record, ...]:
    """Return the records in the shared store that serve a key; none without a store or an answer."""
    shared = open_shared_store()
    try:
        return shared.records(stage, key) if shared else ()
    except RemoteError as error:
        logger.warning("%s: %s", stage, error.what)
        return ()


@contextmanager
def _brought_or_claimed(shared: SharedStore, stage: str, key: str, home: Home) -> Iterator[None]:
    owner = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex}"
    sign, since, is_told = "", time.monotonic(), False
    if _is_here(stage, key, home):
        yield
        return
    while not (is_brought := _bring(shared, stage, key, home)) and not shared.claim(stage, key, owner):
        if not is_told:
            logger.info("%s: waiting, another worker computes it", stage)
            is_told = True
        if (found := shared.claimant(stage, key)) != sign:
            sign, since = found, time.monotonic()
        elif time.monotonic() - since > DEAD:
            logger.warning("%s: taking over from %s, which died", stage, sign.rpartition(" ")[0])
            shared.release(stage, key)
        time.sleep(LOOK)
    if is_brought:
        yield
        return
    try:
        _bring(shared, stage, key, home)  # published between the look and the claim
        with _renewed(shared, stage, key, owner):
            yield
    finally:
        _release(shared, stage, key, owner)


def _bring(shared: SharedStore, stage: str, key: str, home: Home) -> bool:
    cache, is_brought = StageCache(home.cache), False
    for record in shared.records(stage, key):
        try:
            shared.fetch(record.ref, home)
        except RemoteError:
            raise
        except StorageError as error:
            logger.warning("%s: %s; it is removed there and computed again", stage, error.what)
            shared.withdraw(stage, key, record)
            continue
        cache.write(stage, record)
        logger.info("%s: fetched from the shared store", stage)
        is_brought = True
    return is_brought


def _is_here(stage: str, key: str, home: Home) -> bool:
    cache = StageCache(home.cache)
    plain = cache.find(stage, key)
    if plain is not None and (home.root / plain.ref.uri / MANIFEST).is_file():
        return True
    same = [each for each in cache.records(stage) if key_of(without_outcome(each.ingredients)) == key]
    present = [each for each in same if each == cache.find(stage, each.key)]  # not those that lineages keep
    return any((home.root / each.ref.uri / MANIFEST).is_file() for each in present)


@contextmanager
def _renewed(shared: SharedStore, stage: str, key: str, owner: str) -> Iterator[None]:
    is_over = threading.Event()

    def renew() -> None:
        count = 0
        while not is_over.wait(RENEWED):
            count += 1
            try:
                shared.renew(stage, key, f"{owner}.{count}")
            except RemoteError as error:
                logger.debug("the claim of %s was not renewed: %s", stage, error.what)

    thread = threading.Thread(target=renew, name=f"claim of {stage}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _release(shared: SharedStore, stage: str, key: str, owner: str) -> None:
    try:
        if shared.claimant(stage, key).startswith(owner):  # or it was taken over
            shared.release(stage, key)
    except RemoteError as error:
        logger.warning("the claim of %s was not removed: %s; it expires after %.0f s", stage, error.what, DEAD)
