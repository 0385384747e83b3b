"""From which round on a device may be in sums of its cohort.

A device's numbers of a round are in one sum at most, and it compares a list with those that it signed before. So a store that may not know the
last sums has no such round until its owner names one: after a restore, and where a record of sums or the gate itself is gone. What the
coordinator says is no proof: it may offer rounds again that were summed. Other devices of the cohort know the last rounds with a sum, and a
person reads them there. Not seen is a whole folder or a disk image that was put back by other means than `fedcg agent restore`.
"""

from collections.abc import Mapping
from pathlib import Path

from edge_client.store.checked_files import is_gone, read_json, write_json
from fedcg.wire.messages.schemas import SumExchange

GATE_FILE = "sum_gate.json"
RECORDS: Mapping[SumExchange, str] = {"weights": "weights.json", "parts": "sums.json"}
"""The records of sums, by what they are of."""


class SumGate:
    """The gate of one store.

    Args:
        root: of the private store.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / GATE_FILE

    def make(self) -> None:
        """Open the gate of a new store, which was in no sum."""
        if not self._path.exists():
            self._write(1, 0)

    @property
    def first_round(self) -> int | None:
        """The lowest round in whose sums this device may be; None: in none before its owner has named one.

        Raises:
            StoreError: the file can't be read, or is an older copy.
        """
        is_whole = not any(is_gone(self._path.with_name(name)) for name in RECORDS.values())
        return self._number("first") or None if is_whole else None

    @property
    def last_round(self) -> int | None:
        """No sum of a later round has numbers of this device; None: the store can't know that."""
        first = self.first_round
        return None if first is None else max(first - 1, self._number("last"))

    def obstacle(self, round_number: int) -> str:
        """Why this device may not be in the sums of a round, in words; nothing where it may."""
        first = self.first_round
        if first is None:
            return "the private store was restored, or its record of sums is gone: `fedcg cohort resume-sums ROUND`"
        return "" if round_number >= first else f"this device takes part in sums from round {first} on"

    def note(self, round_number: int) -> None:
        """Remember a round before anything of its sums is kept or sent."""
        if round_number > self._number("last"):
            self._write(self._number("first"), round_number)

    def block(self) -> None:
        """Be in no sum until the owner names a round."""
        self._write(0, self._number("last"))

    def resume(self, after: int) -> int:
        """Be in the sums of rounds above `after`, and above all that the store knows; returns the first one."""
        for path in filter(is_gone, map(self._path.with_name, RECORDS.values())):
            write_json(path, {})
        first = max(after + 1, self._number("last") + 1, self._number("first"))
        self._write(first, self._number("last"))
        return first

    def _number(self, name: str) -> int:
        number = read_json(self._path).get(name)
        return number if isinstance(number, int) else 0

    def _write(self, first: int, last: int) -> None:
        write_json(self._path, {"first": first, "last": last})
