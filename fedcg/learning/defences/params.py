"""The parameters of defences, in their own module so that a configuration is read without torch."""

from enum import Enum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from fedcg.config_file import Settings

Size = tuple[int, int, int]
"""Channels, height and width of an image."""
DEFAULT_BLOCK = 4
LEAST_SPREAD = 0.5
"""Anti-GAN: the least spread of generated images within a class, as a share of the real images'. Below it, an attacker can
subtract the texture that they share.
"""


_Steps = Annotated[int, Field(ge=0, le=1_000_000)]


class DefenceParams(Settings):
    """Base of a defence's parameters."""


class ScramblingStep(str, Enum):
    """A step of algorithm 1, by the paper's name."""

    ROTATE = "IR"
    COMPLEMENT = "IA"
    FLIP = "IF"
    PERMUTE_CHANNELS = "IC"
    SHUFFLE = "IS"


def _steps_exist(text: str) -> str:
    known, names = [step.value for step in ScramblingStep], text.split(",") if text else []
    if strange := [name for name in names if name not in known]:
        raise ValueError(f"unknown step {strange[0]!r}; choose from {', '.join(known)}")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{twice[0]} is listed twice, but each step can run only once; remove one")
    return text


# The method `ppidsg` also has these three.
ScramblingSteps = Annotated[
    str,
    AfterValidator(_steps_exist),
    Field(description="encryption steps in order, e.g. IR,IA,IF,IC,IS; empty: all applicable steps"),
]
Block = Annotated[int, Field(ge=1, description="side of the scrambled blocks in pixels")]
ScramblingKey = Annotated[Literal["device", "cohort"], Field(description="scrambling key: per device, or cohort-wide")]


class EtcParams(DefenceParams):
    """Parameters of the block scrambling."""

    scrambling: ScramblingSteps = ""
    block: Block = DEFAULT_BLOCK
    key: ScramblingKey = "device"

    def order(self, channels: int) -> tuple[ScramblingStep, ...]:
        """The steps for images with this number of channels. The default is the paper's order, without IC for grey images."""
        if self.scrambling:
            return tuple(map(ScramblingStep, self.scrambling.split(",")))
        return tuple(step for step in ScramblingStep if channels > 1 or step is not ScramblingStep.PERMUTE_CHANNELS)


class AntiGanParams(DefenceParams):
    """Parameters. Defaults are the paper's if it states them; steps and width suit a device without a GPU.

    Attributes:
        v_e: target variance of every window of a generated image, pixels in [-1, 1] (at most 1.0).
        mu: share of the real image in the mixed one (μ).
        obfuscation_weight: λ of eq. 4.
        window: side of a window, pixels.
        window_loss: eq. 2 as the mean over windows and colour channels, or as `printed`: the sum over windows, each
            with all its channels.
        diversity: weight of FedCG's mode-seeking term, which keeps the images of a class apart; 0, as in the paper: none.
        gan_steps: steps of the first training, without obfuscation.
        obfuscation_steps: steps of the second training, with eq. 4.
        batch_size: images per step.
        lr: learning rate of Adam; the paper's 1e-4 is for longer training.
        width: channels of the generator before its last layer; 64 in the paper, four times the work.
        noise_dim: dimension of z.
        features: C; `auto` is the pretrained convolution if its weights are found, else the Gabor bank.
        checkpoint_every: steps between checkpoints.
    """

    v_e: Annotated[float, Field(ge=0, le=1)] = 0.5
    mu: Annotated[float, Field(ge=0, le=1)] = 0.5
    obfuscation_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 250.0
    window: Annotated[int, Field(ge=2, le=1024)] = 4
    # Excluded so that GANs trained before these two parameters existed keep their file.
    window_loss: Annotated[Literal["mean", "printed"], Field(exclude_if=lambda loss: loss == "mean")] = "mean"
    diversity: Annotated[float, Field(ge=0, allow_inf_nan=False, exclude_if=lambda weight: not weight)] = 0.0
    gan_steps: _Steps = 600
    obfuscation_steps: _Steps = 200
    batch_size: Annotated[int, Field(ge=2, le=4096)] = 50
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2e-4
    width: Annotated[int, Field(ge=1, le=256)] = 32
    noise_dim: Annotated[int, Field(ge=1, le=1024)] = 100
    features: Literal["auto", "efficientnet_lite0", "gabor"] = "auto"
    checkpoint_every: Annotated[int, Field(ge=1)] = 100

    @property
    def steps(self) -> int:
        """Total steps of both trainings."""
        return self.gan_steps + self.obfuscation_steps
