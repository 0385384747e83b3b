"""EtC (after Chuman, Sirichotedumrong and Kiya, 2019): a device's images encrypted block by block, once. Torch-free.

The baseline of PPIDSG's tables 1 and 4, with the scrambling of its algorithm 1 (`scrambling`). It protects images that
an attacker reconstructs from an update, or that a model has memorised: they are scrambled. It does not protect:
  * labels, label counts and membership: a classifier's update still reveals them (PPIDSG's table 1: 86 to 100 % of
    labels);
  * against anyone with one image and its encryption: all images share one key, and the pair reveals most of it;
  * against puzzle solvers: pixels stay within their block, so brightness, texture and colour of 4x4 blocks survive.
Cost: the trained model classifies only encrypted images, so every image is encrypted with the device's keys before
evaluation or serving. Images of devices with different keys look different, and one shared model must learn all of
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcg.learning.defences.defence import Defence, DefencePlace, Defended
from fedcg.learning.defences.params import EtcParams, Size
from fedcg.learning.errors import DefenceError

if TYPE_CHECKING:
    from fedcg.learning.defences.scrambling import Scrambling
    from fedcg.learning.image_set import ImageSet


def _input_layer(params: EtcParams, place: DefencePlace, size: Size) -> Scrambling:
    # Imports torch, not needed to read a configuration.
    from fedcg.learning.defences.scrambling import draw_keys, scrambling_of

    streams = place.streams if params.key == "device" else place.cohort
    if streams is None:
        raise DefenceError("etc: key = cohort needs the cohort secret: run `fedcg cohort join`, or set key = device")
    try:
        return scrambling_of(draw_keys(streams, size, params.block), size, params.order(size[0]))
    except DefenceError as error:
        raise DefenceError(f"etc: {error}") from error


def _apply(images: ImageSet, params: EtcParams, place: DefencePlace) -> Defended:
    from fedcg.learning.defences.sample_pictures import shown

    channels, height, width = images.images.shape[1:]
    steps = ",".join(step.value for step in params.order(channels))
    facts = {"steps": steps, "block": str(params.block), "key": params.key}
    return shown(images, facts, _input_layer(params, place, (channels, height, width)).encrypt(images.images))


DEFENCE = Defence("etc", EtcParams, _apply, is_per_image=True, check=_input_layer, input_layer=_input_layer)
