"""The form of images that a network takes, as a value; what makes an image so is `fedcg.imaging`. Needs neither numpy nor Pillow."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_Side = Annotated[int, Field(ge=4, le=1024, description="pixels; every image is resized")]


class ImageForm(BaseModel):
    """How an image becomes a tensor: decoded, converted to `mode`, resized to height x width, scaled to [0, 1], normalised."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mode: Annotated[Literal["L", "RGB"], Field(description="L is grey, RGB is colour")]
    height: _Side
    width: _Side
    mean: Annotated[
        tuple[Annotated[float, Field(ge=-1e3, le=1e3)], ...],
        Field(description="one per channel, of pixels between 0 and 1"),
    ]
    std: Annotated[tuple[Annotated[float, Field(gt=0, le=1e3)], ...], Field(description="one per channel, above 0")]

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colour."""
        return 1 if self.mode == "L" else 3

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image's pixels."""
        return self.height, self.width, self.channels

    @model_validator(mode="after")
    def _one_statistic_per_channel(self) -> ImageForm:
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise ValueError(f"mode {self.mode} needs {self.channels} means and standard deviations")
        return self
