"""On an agent's import path, this makes its processes seal noise, as large as a sealed sum allows."""

import numpy as np

from fedcg.wire import sealed_numbers

_honest = sealed_numbers.to_numbers


def _to_numbers(tensors, layouts, most, share):  # type: ignore[no-untyped-def]
    stream = np.random.default_rng(7)
    noise = {name: stream.uniform(-most, most, array.shape).astype(np.float32) for name, array in tensors.items()}
    return _honest(noise, layouts, most, share)


sealed_numbers.to_numbers = _to_numbers
