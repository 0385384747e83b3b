"""EtC as a data defence: a device's images encrypted block by block, once, before any method trains on them.

The baseline of PPIDSG's tables 1 and 4 (after Chuman, Sirichotedumrong and Kiya 2019), by the scrambling of its algorithm 1.
What it protects: an image that an attacker reconstructs from an update, or that a model has memorised, is a scrambled one.
What it does not:
  * labels, label counts and membership; a classifier's update reveals them as before (PPIDSG's table 1: 86 to 100 % of labels);
  * against anyone with one image and its encryption: all images share one key, and the pair reveals most of it;
  * against puzzle solvers: pixels stay within their block, so brightness, texture and colour of 4x4 blocks survive.
What it costs: a model trained so classifies encrypted images only, so every image is encrypted with the device's keys before it is
evaluated or served; and devices with different keys have images of different looks, which one shared model must learn side by side.
"""

from __future__ import annotations

from dataclasses import replace

from fedcg.learning.defences.scrambling import DEFAULT_BLOCK, draw_keys, encrypt
from fedcg.learning.image_set import ImageSet
from fedcg.learning.seeds import Streams


def encrypted(data: ImageSet, device: Streams, block: int = DEFAULT_BLOCK) -> ImageSet:
    """Training, validation or test images of a device with its own keys: every step that their channels allow.

    Args:
        data: images, all sets of a device of one size.
        device: streams of the device's secret, the same ones for each of its sets and for every round.
        block: pixels of a block's side.

    Raises:
        DefenceError: the block does not divide the images.
    """
    channels, height, width = data.images.shape[1:]
    keys = draw_keys(device, (channels, height, width), block)
    return replace(data, images=encrypt(data.images, keys))
