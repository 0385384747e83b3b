"""Facts that are at most a second old: many watchers of one page ask for the same ones, and they are worked out once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

FactsT = TypeVar("FactsT")
MAX_AGE_S = 1.0
MAX_KEPT = 64


class Recent:
    """Keeps facts for a moment. From any thread.

    Args:
        max_age_s: how old a kept fact may be.
        clock: monotonic seconds.
    """

    def __init__(self, max_age_s: float = MAX_AGE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_age_s = max_age_s
        self._clock = clock
        self._kept: dict[Hashable, tuple[float, threading.Lock, Any]] = {}
        self._changing = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], FactsT]) -> FactsT:
        """The facts of a key: kept ones that are recent, else new ones; those who ask meanwhile wait for them."""
        with self._changing:
            made_at, making, facts = self._kept.get(key, (float("-inf"), threading.Lock(), None))
            if self._clock() - made_at < self._max_age_s:
                return cast(FactsT, facts)
            self._kept[key] = (made_at, making, facts)
        with making:
            made_at, _, facts = self._kept.get(key, (float("-inf"), making, None))
            if self._clock() - made_at < self._max_age_s:
                return cast(FactsT, facts)
            facts = make()
            with self._changing:
                self._kept[key] = (self._clock(), making, facts)
                while len(self._kept) > MAX_KEPT:
                    del self._kept[min(self._kept, key=lambda each: self._kept[each][0])]
            return facts

    def clear(self) -> None:
        """Forget everything: something was changed."""
        with self._changing:
            self._kept.clear()
