"""How much of a batch goes through the networks at once on this box: halved when memory ran out, and remembered. Torch-free."""

from __future__ import annotations

import logging
from pathlib import Path

from devices.files import oom_kills
from edge_client.errors import StoreError
from edge_client.store.small_files import read_json, write_json

MEMORY_FILE = "memory.json"
LEAST_SHARE = 1 / 128
"""A batch that does not fit in so many pieces does not fit at all."""
NEAR_END_BYTES = 256 << 20
"""Less than this left in a round counts as near the end: about what a step of the larger networks takes at once."""
MOST_FAILURES = 3
_log = logging.getLogger(__name__)


class MemoryShare:
    """The share of a batch that fits, in the file `memory.json` of a private store; worth nothing on a box with another memory.

    A process that the kernel kills can't say so. It notes the kernel's count of such kills before a round; where its successor finds the
    round unfinished and the count higher in the same boot, memory was the reason. A kill by hand or a power cut leaves the share as it is.

    Other failures are counted where memory was near its end in their round, whatever error or signal they came with: after three without a
    round between them that went well, the share is halved.

    What is available now decides once, before the first round; afterwards the kept share holds, so that a repeated round is cut as before
    whatever else runs on the box meanwhile. The file removed, it decides anew.

    Args:
        store: folder of the private store.
        planned: the share by what the box has (`devices.profile`).
        memory: what it has: the place of training and its bytes.
        root: of the file tree that describes the box.
        at_first: the share by what is available now, where none is kept; None: `planned`.

    Attributes:
        share: in (0, 1].
        was_killed: whether the process before this one died in a round for memory: by the kernel, or as the third that died near its end.
    """

    def __init__(
        self, store: Path, planned: float, memory: str, root: Path = Path("/"), at_first: float | None = None
    ) -> None:
        self._path, self._memory, self._root = store / MEMORY_FILE, memory, root
        self.share, self.was_killed = planned if at_first is None else at_first, False
        self._failures, self._was_near, self._in_round = 0, False, ""
        known = self._read()
        if known.get("memory") != memory:
            return
        share, noted = known.get("share"), str(known.get("in_round") or "")
        if isinstance(share, float) and LEAST_SHARE <= share <= 1:
            self.share = min(share, planned)
        (boot, _, before), (boot_now, _, now) = (text.rpartition(" ") for text in (noted, oom_kills(root)))
        counted = bool(boot) and boot == boot_now and before.isdigit() and now.isdigit()
        self.was_killed = counted and int(before) < int(now)
        failures = known.get("failures")
        self._failures = failures if isinstance(failures, int) else 0
        self._was_near = bool(noted) and known.get("near_end") is True
        if self.was_killed:
            self.halve()
        else:
            self.was_killed = self.failed()

    def halve(self) -> bool:
        """Whether half the rows may fit where so many did not; then the share is halved."""
        if self.share / 2 < LEAST_SHARE:
            return False
        self.share, self._failures = self.share / 2, 0
        self._write("")
        return True

    def round_begins(self) -> None:
        """Note that a round is trained now."""
        self._was_near = False
        self._write(oom_kills(self._root) or "round")

    def look(self, free_bytes: int | None) -> None:
        """Note, once in a round, that memory is near its end."""
        if self._in_round and not self._was_near and free_bytes is not None and free_bytes < NEAR_END_BYTES:
            self._was_near = True
            self._write(self._in_round)

    def failed(self) -> bool:
        """Count a failure with another reason; whether it was the third with memory near its end, and the share is halved."""
        self._failures += self._was_near
        self._was_near = False
        return self._failures >= MOST_FAILURES and self.halve()

    def round_ended(self, *, well: bool = False) -> None:
        """Note that it ended, and whether it went well."""
        self._failures = 0 if well else self._failures
        self._write("")

    def _read(self) -> dict[str, object]:
        try:
            return read_json(self._path)
        except StoreError as error:
            _log.warning("%s; it is written anew", error)
            return {}

    def _write(self, in_round: str) -> None:
        self._in_round = in_round
        known: dict[str, object] = {"memory": self._memory, "share": float(self.share), "in_round": in_round}
        known |= {"near_end": self._was_near, "failures": self._failures}
        try:
            write_json(self._path, known)
        except OSError as error:  # a full disk: the round goes on, and what it can't do without is its commit
            _log.warning("%s can't be written: %s", self._path.name, error)
