"""The steps of a masked sum as messages carry them (`fedcg.wire.sums`): strict schemas of what devices and coordinator say to each other.

Sums have at most 32 devices, so that each step fits one control message.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_SUM_DEVICES = 32
_Device = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
_Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
_Share = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_Sealed = Annotated[str, Field(pattern=r"^[0-9a-f]{96}$")]
_Few = Field(max_length=MAX_SUM_DEVICES)


class _Step(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SumKeys(_Step):
    """A device announces its keys for the sum of a round attempt, and the weight of its numbers; in hex."""

    step: Literal["keys"] = "keys"
    cipher: _Key
    mask: _Key
    mark: _Key
    weight: Annotated[int, Field(ge=1, le=1 << 24)]
    signature: _Signature


class SumShares(_Step):
    """A device deals out its shares, sealed for each member."""

    step: Literal["shares"] = "shares"
    sealed: Annotated[dict[_Device, _Sealed], _Few]


class SumSigned(_Step):
    """A device signs the list of survivors."""

    step: Literal["signed"] = "signed"
    signature: _Signature


class SumRevealed(_Step):
    """A device gives its shares that open the sum: for a survivor of its own mask, for a lost device of its pair masks."""

    step: Literal["revealed"] = "revealed"
    shares: Annotated[dict[_Device, _Share], _Few]


class SumMembers(_Step):
    """Who takes part in the sum, and what each announced."""

    step: Literal["members"] = "members"
    announced: Annotated[dict[_Device, SumKeys], _Few]


class SumDealt(_Step):
    """The shares that were dealt out to the recipient, by the device that dealt them: these are the peers that it masks with."""

    step: Literal["dealt"] = "dealt"
    sealed: Annotated[dict[_Device, _Sealed], _Few]


class SumSurvivors(_Step):
    """Whose masked numbers came; asks for a signature."""

    step: Literal["survivors"] = "survivors"
    names: Annotated[tuple[_Device, ...], _Few]


class SumOpening(_Step):
    """The signatures over the list of survivors; asks for shares."""

    step: Literal["opening"] = "opening"
    names: Annotated[tuple[_Device, ...], _Few]
    signatures: Annotated[dict[_Device, _Signature], _Few]


class SumOff(_Step):
    """There is no sum in this attempt: the recipient takes part without one."""

    step: Literal["off"] = "off"


FromDevice = SumKeys | SumShares | SumSigned | SumRevealed
ToDevice = SumMembers | SumDealt | SumSurvivors | SumOpening | SumOff
