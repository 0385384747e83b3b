"""Deletes what closed rounds and killed processes left on the disk; the database keeps its record of every round.

Kept are the last rounds' updates (for inspection), the aggregates they are coded to, and always the data that a restart
needs: the spec, the newest aggregate with its server state, and everything of the open round.
"""

from __future__ import annotations

from collections.abc import Callable

from coordinator.storage.store import Store
from fedcg.wire.artifacts.artifact_store import ArtifactStore

UNKNOWN_S = 3600.0
"""A file that no record names is deleted at this age: other processes store artifacts before they store their record."""


class Pruner:
    """Prunes one federation.

    Args:
        store: knows the artifacts of each round.
        artifacts: the directory of artifacts.
        federation: its id.
        keep_rounds: closed rounds whose artifacts stay.
        forget: called with every artifact before it is deleted.
    """

    def __init__(
        self,
        store: Store,
        artifacts: ArtifactStore,
        federation: str,
        keep_rounds: int,
        forget: Callable[[str], None],
    ) -> None:
        self._store = store
        self._artifacts = artifacts
        self._federation = federation
        self._keep_rounds = keep_rounds
        self._forget = forget
        self._done = 0  # rounds below this one were pruned by this process

    def prune(self, closed: int) -> tuple[int, int]:
        """Delete what rounds before the kept ones left. Repeats harmlessly what an interrupted call did not get to.

        Args:
            closed: the round that was closed last.

        Returns:
            How many files were deleted, and their bytes.
        """
        first_kept = closed - self._keep_rounds + 1
        if first_kept <= self._done:
            return 0, 0
        old = self._store.artifacts_of_rounds(self._federation, self._done, first_kept)
        kept = self._store.artifacts_of_rounds(self._federation, first_kept, None)
        gone = sorted(old - kept - {self._store.federation(self._federation).spec} - self._known(but=self._federation))
        for artifact in gone:
            self._forget(artifact)
        pruned = self._artifacts.delete_all(gone)
        self._done = first_kept
        return pruned

    def sweep(self, now: float) -> tuple[int, int]:
        """Delete files that no record of any federation names: a process was killed between the file and its record.

        Args:
            now: unix time.

        Returns:
            How many files were deleted, and their bytes.
        """
        files = list(self._artifacts.ids())  # before the records are read: what is stored meanwhile stays
        known = self._known()
        unknown = [file for file in files if file not in known]
        return self._artifacts.delete_all(
            file for file in unknown if self._artifacts.path(file).stat().st_mtime < now - UNKNOWN_S
        )

    def _known(self, but: str = "") -> set[str]:
        """The artifacts that the records of all federations (but one) name: equal server states are one file."""
        known: set[str] = set()
        for federation in self._store.federations():
            if federation.id != but:
                known |= {federation.spec} | self._store.artifacts_of_rounds(federation.id, 0, None)
        return known
