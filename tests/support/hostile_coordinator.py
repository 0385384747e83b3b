"""A coordinator that attacks sealed sums: the real program with one malicious change.

python -m tests.support.hostile_coordinator ATTACK coordinator run ...
"""

import sys
from dataclasses import replace

from coordinator.aggregation.jobs import OpenedSum
from coordinator.messaging.publisher import Publisher
from coordinator.sums import SealedSums, SumBoard
from fedcg.cli import main


def hurry() -> None:
    """Requests almost no training."""
    invited = Publisher.invite
    Publisher.invite = lambda publisher, device, at, share=1.0: invited(publisher, device, at, 1e-6)  # type: ignore[assignment,method-assign]


def changed() -> None:
    """Changes one number of the sum that the devices open."""
    opened = SealedSums._opened

    def other(sums: SealedSums, board: SumBoard) -> OpenedSum:
        found = opened(sums, board)
        return replace(found, correction=found.correction[:-4] + bytes(4))

    SealedSums._opened = other  # type: ignore[assignment,method-assign]


ATTACKS = {"hurry": hurry, "changed": changed}

if __name__ == "__main__":
    ATTACKS[sys.argv.pop(1)]()
    main()
