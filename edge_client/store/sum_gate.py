"""The first round in whose sealed sums a device may be.

A device's numbers of a round are in at most one sum, and a new list is compared with all lists signed before. A store may lack the latest sums
after a restore, or if a record of sums or the gate itself is missing. Then sums are blocked until the owner names a round. The coordinator is no
proof, because it may offer summed rounds again. The owner looks up the last round with a sum on the other devices of the cohort. A folder or
disk image that was restored without `fedcg agent restore` is not detected.
"""

from collections.abc import Mapping
from pathlib import Path

from edge_client.store.checked_files import is_gone, read_json, write_json
from fedcg.wire.messages.schemas import SumExchange

GATE_FILE = "sum_gate.json"
RECORDS: Mapping[SumExchange, str] = {"weights": "weights.json", "parts": "sums.json"}
"""The records of sums, by kind."""


class SumGate:
    """The gate of one store.

    Args:
        root: of the private store.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / GATE_FILE

    def make(self) -> None:
        """Open the gate of a new store, which has been in no sum."""
        if not self._path.exists():
            self._write(1, 0)

    @property
    def first_round(self) -> int | None:
        """The lowest round in whose sums this device may be; None: blocked until the owner names one.

        Raises:
            StoreError: the file can't be read or is an older copy.
        """
        is_whole = not any(is_gone(self._path.with_name(name)) for name in RECORDS.values())
        return self._number("first") or None if is_whole else None

    @property
    def last_round(self) -> int | None:
        """The last round in whose sum this device's numbers may be; None if unknown."""
        first = self.first_round
        return None if first is None else max(first - 1, self._number("last"))

    def obstacle(self, round_number: int) -> str:
        """Why this device may not be in the sums of a round, as text; empty if it may."""
        first = self.first_round
        if first is None:
            return "the private store was restored, or its record of sums is missing: `fedcg cohort resume-sums ROUND`"
        return "" if round_number >= first else f"this device joins sums from round {first} on"

    def note(self, round_number: int) -> None:
        """Record a round before any of its sum data is stored or sent."""
        if round_number > self._number("last"):
            self._write(self._number("first"), round_number)

    def block(self) -> None:
        """Block sums until the owner names a round."""
        self._write(0, self._number("last"))

    def resume(self, after: int) -> int:
        """Allow sums of rounds above `after` and above all rounds known to the store. Returns the first allowed round."""
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
