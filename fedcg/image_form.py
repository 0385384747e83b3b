"""The form of images that a network takes, as a value; what makes an image so is `fedcg.imaging`. Needs neither numpy nor Pillow."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from fedcg.config_file import Settings

_Side = Annotated[int, Field(ge=4, le=1024, description="pixels; every image is resized")]


class ImageForm(Settings):
    """How an image becomes a tensor: decoded, converted to `mode`, resized to height x width, scaled to [0, 1], normalised."""

    model_config = ConfigDict(allow_inf_nan=False)

    mode: Annotated[Literal["L", "RGB"], Field(description="L is grey, RGB is colour")]
    height: _Side
    width: _Side
    mean: Annotated[
        tuple[Annotated[float, Field(ge=-1e3, le=1e3)], ...],
        Field(description="one per channel, of pixels between 0 and 1"),
    ]
    std: Annotated[tuple[Annotated[float, Field(ge=1e-4, le=1e3)], ...], Field(description="one per channel")]

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colour."""
        return 1 if self.mode == "L" else 3

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image's pixels."""
        return self.height, self.width, self.channels

    @field_validator("mean", "std")
    @classmethod
    def _one_per_channel(cls, numbers: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        mode = info.data.get("mode")  # missing where it is wrong itself
        if mode is not None and len(numbers) != len(mode):
            raise ValueError(f"must have one number for each channel, {len(mode)} with mode {mode}, not {len(numbers)}")
        return numbers
