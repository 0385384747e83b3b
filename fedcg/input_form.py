"""The form of a network's inputs, as a value: images, or tensors of any shape. Needs neither numpy, torch nor Pillow.

`fedcg.imaging` brings an image into a form.
"""

import math
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator

from fedcg.config_file import Settings

_Side = Annotated[int, Field(ge=4, le=1024, description="pixels; every image is resized")]
_Means = tuple[Annotated[float, Field(ge=-1e3, le=1e3)], ...]
_Deviations = tuple[Annotated[float, Field(ge=1e-4, le=1e3)], ...]
MAX_NUMBERS = 16 * 1024 * 1024
"""The most numbers in one tensor: 64 MiB as float32."""


class ImageForm(Settings, allow_inf_nan=False):
    """How an image becomes a tensor: decoded, converted to `mode`, resized to height x width, scaled to [0, 1], normalised."""

    kind: Annotated[Literal["image"], Field(description="image or tensor; each has its own settings")] = "image"
    mode: Annotated[Literal["L", "RGB"], Field(description="L is grey, RGB is colour")]
    height: _Side
    width: _Side
    mean: Annotated[_Means, Field(description="one per channel, of pixels between 0 and 1")]
    std: Annotated[_Deviations, Field(description="one per channel")]

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colour."""
        return 1 if self.mode == "L" else 3

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image's pixels."""
        return self.height, self.width, self.channels

    @property
    def dtype(self) -> Literal["uint8"]:
        """Element type of an image's pixels."""
        return "uint8"

    @property
    def tensor_shape(self) -> tuple[int, int, int]:
        """Channels, height and width: one image as the network gets it."""
        return self.channels, self.height, self.width

    @property
    def in_words(self) -> str:
        """For messages."""
        return f"images ({self.mode}, {self.height}x{self.width})"

    @field_validator("mean", "std")
    @classmethod
    def _one_per_channel(cls, numbers: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        mode = info.data.get("mode")  # missing if it is invalid itself
        if mode is not None and len(numbers) != len(mode):
            raise ValueError(f"must have one number for each channel, {len(mode)} with mode {mode}, not {len(numbers)}")
        return numbers


class TensorForm(Settings, allow_inf_nan=False):
    """Tensors of one shape and element type, normalised along their first dimension or not at all.

    Attributes:
        kind: image or tensor; each has its own settings.
    """

    kind: Literal["tensor"]
    shape: Annotated[
        tuple[Annotated[int, Field(ge=1, le=MAX_NUMBERS)], ...],
        Field(
            min_length=1,
            max_length=4,
            description="of one input, 1 to 4 dimensions, the channels or columns first; at most 16,777,216 numbers",
        ),
    ]
    dtype: Annotated[
        Literal["uint8", "float32"],
        Field(description="of the data; uint8 is scaled to [0, 1] before it is normalised, float32 is not"),
    ] = "float32"
    mean: Annotated[
        tuple[Annotated[float, Field(ge=-1e30, le=1e30)], ...],
        Field(description="one per index of the first dimension; none: not normalised"),
    ] = ()
    std: Annotated[
        tuple[Annotated[float, Field(ge=1e-30, le=1e30)], ...],
        Field(description="as `mean`; both or neither", validate_default=True),
    ] = ()

    @property
    def channels(self) -> int:
        """Size of the first dimension."""
        return self.shape[0]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """One input as the network gets it."""
        return self.shape

    @property
    def in_words(self) -> str:
        """For messages."""
        normalised = f", normalised by {list(self.mean)} and {list(self.std)}" if self.mean else ""
        return f"{self.dtype} {list(self.shape)}{normalised}"

    @field_validator("shape")
    @classmethod
    def _is_bounded(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        if math.prod(shape) > MAX_NUMBERS:
            raise ValueError(f"has {math.prod(shape):,} numbers; one input has at most {MAX_NUMBERS:,}")
        return shape

    @field_validator("mean", "std")
    @classmethod
    def _one_per_index(cls, numbers: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        shape, mean = info.data.get("shape"), info.data.get("mean")  # missing if they are invalid themselves
        if info.field_name == "std" and mean is not None and bool(mean) != bool(numbers):
            raise ValueError("goes with mean: set both, or neither")
        if numbers and shape is not None and len(numbers) != shape[0]:
            raise ValueError(f"must have one number for each of {shape[0]} in the first dimension, not {len(numbers)}")
        return numbers


def _tag(values: object) -> str:
    kind = values.get("kind") if isinstance(values, dict) else getattr(values, "kind", None)
    return "[TensorForm]" if kind == "tensor" else "[ImageForm]"


# A tag names its class, so that `fedcg.config_file` finds the settings of a problem.
InputForm = Annotated[
    Annotated[ImageForm, Tag("[ImageForm]")] | Annotated[TensorForm, Tag("[TensorForm]")], Discriminator(_tag)
]
"""Images if no `kind` is given."""


def can_take(form: InputForm, other: InputForm) -> bool:
    """Whether a model of one form accepts the inputs of the other: any image, because it is resized; tensors of the same shape and type."""
    if isinstance(form, ImageForm) or isinstance(other, ImageForm):
        return form.kind == other.kind
    return (form.shape, form.dtype) == (other.shape, other.dtype)


def taken_in_words(form: InputForm) -> str:
    """The inputs that a model of this form accepts, for messages."""
    if isinstance(form, ImageForm):
        return f"images, {form.mode}, resized to {form.width} x {form.height} pixels"
    return f"tensors [{', '.join(map(str, form.shape))}] of {form.dtype}"
