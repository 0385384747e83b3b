"""The artifacts that devices may fetch: the spec and the aggregates of the federation, nothing else."""

from __future__ import annotations

from collections import OrderedDict

from fedcg.wire.artifacts import ArtifactStore
from fedcg.wire.messages import ArtifactRef
from fedcg.wire.transfer import Ranges, frames_for, make_ref

CACHED = 3
MAX_SERVED_CHUNKS = 64
"""Of one request; a device that wants more asks again, so that nobody can make the coordinator queue gigabytes."""


class Library:
    """Reads artifacts once, keeps the latest few in memory, and cuts them for the link.

    Args:
        store: where they lie.
        chunk_bytes: chunk size of the link.
    """

    def __init__(self, store: ArtifactStore, chunk_bytes: int) -> None:
        self._store = store
        self._chunk_bytes = chunk_bytes
        self._allowed: set[str] = set()
        self._refs: dict[str, ArtifactRef] = {}
        self._cache: OrderedDict[str, bytes] = OrderedDict()

    def allow(self, artifact: str) -> None:
        """Let devices fetch an artifact."""
        self._allowed.add(artifact)

    def allows(self, artifact: str) -> bool:
        """Whether devices may fetch it."""
        return artifact in self._allowed

    def change_chunk_bytes(self, chunk_bytes: int) -> None:
        """The link takes another size now; refs have to be told anew."""
        self._chunk_bytes = chunk_bytes
        self._refs.clear()

    def ref(self, artifact: str) -> ArtifactRef:
        """How an artifact is announced. Reads the disk on the first call.

        Raises:
            FileNotFoundError: it is gone.
            IntegrityError: its file is damaged.
        """
        if artifact not in self._refs:
            self._refs[artifact] = make_ref(self._data(artifact), self._chunk_bytes)
        return self._refs[artifact]

    def frames(self, artifact: str, ranges: Ranges | None) -> list[bytes]:
        """The chunk frames of these ranges, at most `MAX_SERVED_CHUNKS`; all frames when `ranges` is None."""
        ref, data = self.ref(artifact), self._data(artifact)
        if ranges is None:
            return list(frames_for(data, ref))
        granted: list[tuple[int, int]] = []
        room = MAX_SERVED_CHUNKS
        for first, count in ranges:
            if room <= 0:
                break
            granted.append((first, min(count, room)))
            room -= min(count, room)
        return list(frames_for(data, ref, granted))

    def _data(self, artifact: str) -> bytes:
        if artifact not in self._cache:
            self._cache[artifact] = self._store.get(artifact)
            while len(self._cache) > CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(artifact)
        return self._cache[artifact]
