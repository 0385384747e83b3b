"""A coordinator that attacks sealed sums: the real program with one malicious change.

python -m tests.support.hostile_coordinator ATTACK coordinator run ...
"""

import sys
from dataclasses import replace
from typing import Any

from coordinator.aggregation.jobs import OpenedSum
from coordinator.messaging.publisher import Publisher
from coordinator.sums import SealedSums, SumBoard
from fedcg.cli import main
from fedcg.wire.messages import schemas

LAST = "site-5"


def views_of(device: str) -> str:
    """Return the device that is missing in the members shown to this one."""
    return "site-1" if device in ("site-4", LAST) else LAST


def split_view() -> None:
    """Shows some devices other members than the rest, and opens a list that three of its four members have signed."""
    sent, received = Publisher.sum_step, SumBoard.receive

    def sum_step(publisher: Publisher, device: str, at: Any, exchange: Any, step: Any) -> bool:
        hidden = views_of(device)
        changed: dict[str, Any] = {}
        for name in ("announced", "sealed", "signatures"):
            if hasattr(step, name):
                changed[name] = {one: value for one, value in getattr(step, name).items() if one != hidden}
        if hasattr(step, "names"):
            changed["names"] = tuple(one for one in step.names if one != hidden)
        return sent(publisher, device, at, exchange, step.model_copy(update=changed))

    def receive(board: SumBoard, device: str, step: Any, now: float) -> Any:
        if isinstance(step, schemas.SumShares):
            step = step.model_copy(update={"sealed": dict.fromkeys(board.record.keys, bytes(48)) | step.sealed})
        return received(board, device, step, now)

    Publisher.sum_step = sum_step  # type: ignore[assignment,method-assign]
    SumBoard.receive = receive  # type: ignore[assignment,method-assign]
    SumBoard.check = lambda *_: None  # type: ignore[method-assign]


def freeze() -> None:
    """Withholds the mean, so that numbers repeat in round 2, and omits one device there: the difference shows its numbers."""
    opened, invited, received = SealedSums._opened, Publisher.invite, SealedSums.receive

    def withheld(sums: SealedSums, board: SumBoard) -> OpenedSum:
        opened(sums, board)
        return OpenedSum()

    def receive(sums: SealedSums, device: str, message: schemas.SumUp) -> None:
        if device != LAST or message.round == 1:
            received(sums, device, message)
        else:
            board = sums._boards["parts"]
            sums._follow(board, board.leave_out(device, 0.0))

    SealedSums._opened = withheld  # type: ignore[assignment,method-assign]
    SealedSums.receive = receive  # type: ignore[assignment,method-assign]
    Publisher.invite = lambda publisher, device, at, share=1.0: invited(  # type: ignore[assignment,method-assign]
        publisher, device, at, 1.0 if at.round == 1 else STILL
    )


STILL = 0.05
"""The smallest share of local steps that a device's default policy allows."""


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


ATTACKS = {"split-view": split_view, "freeze": freeze, "hurry": hurry, "changed": changed}

if __name__ == "__main__":
    ATTACKS[sys.argv.pop(1)]()
    main()
