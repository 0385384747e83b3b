"""Whether the devices of a federation share one cohort secret, from the marks in their hellos; kept in memory only."""

from __future__ import annotations

from collections import Counter

from fedcg.wire.messages.messages import CohortVerdict


class Cohorts:
    """The marks received so far."""

    def __init__(self) -> None:
        self._marks: dict[str, str | None] = {}

    def note(self, device: str, mark: str | None) -> tuple[str, ...]:
        """Store a device's mark (None for a device without a secret); returns the devices that have another one."""
        self._marks[device] = mark
        return tuple(sorted(name for name, other in self._marks.items() if other != mark))

    def forget(self, device: str) -> None:
        """Forget the mark of a device that left the federation: the others are judged without it."""
        self._marks.pop(device, None)

    def verdict(self, device: str) -> CohortVerdict:
        """Whether a device's secret equals those of all other devices that have sent a mark."""
        mine = self._marks.get(device)
        others = {mark for name, mark in self._marks.items() if name != device}
        if not others:
            return CohortVerdict.ALONE
        return CohortVerdict.SAME if others == {mine} else CohortVerdict.DIFFERENT

    def without(self) -> list[str]:
        """The devices without a secret."""
        return sorted(device for device, mark in self._marks.items() if mark is None)

    def outsiders(self) -> dict[str, str]:
        """The devices whose secret is not that of most others, and why they are outside."""
        counts = Counter(mark for mark in self._marks.values() if mark is not None)
        most = max(sorted(counts), key=lambda mark: counts[mark], default=None)
        return {
            device: "it has no cohort secret" if mark is None else "its cohort secret is not that of most devices"
            for device, mark in self._marks.items()
            if mark is None or mark != most
        }
