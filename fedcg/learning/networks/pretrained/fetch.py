"""Downloads a backbone's weights from where timm says they are, and checks them before they are kept."""

from __future__ import annotations

import tempfile
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from fedcg.errors import ConnectionFailedError
from fedcg.learning.backbone_names import MAX_WEIGHT_BYTES, parse_projected
from fedcg.learning.errors import NetworkError
from fedcg.learning.networks.pretrained.backbone import tensor_shapes, timm_library
from fedcg.learning.networks.pretrained.weights import read_weights

_TIMEOUT_S = 30.0
_PIECE = 1 << 20


def fetch_weights(backbone: str, out: Path) -> Path:
    """Download timm's default weights of a backbone into a folder, as `NAME.safetensors` or `NAME.pth`.

    Args:
        backbone: a name of `fedcg.learning.backbone_names.BACKBONES`, or `timm:NAME`.
        out: the folder; made where there is none. A file of that name is replaced.

    Raises:
        NetworkError: an unknown backbone, no weights for it, or a download that does not hold the network's tensors.
        ConnectionFailedError: no network.
    """
    name = f"{backbone}+project"
    known, shapes = parse_projected(name), tensor_shapes(name)
    address = _address(known.timm)
    path = out / f"{known.timm}{'.safetensors' if address.endswith('.safetensors') else '.pth'}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=".fetch-") as folder:
            part = Path(folder) / path.name
            _download(address, part)
            read_weights(part, shapes)
            part.replace(path)
    except (URLError, TimeoutError) as error:
        raise ConnectionFailedError(
            f"{address} can't be reached ({getattr(error, 'reason', error)}): run this command on a machine with a network, and copy {path.name} here"
        ) from error
    except OSError as error:
        raise NetworkError(f"{path}: can't be fetched ({error}); try again, or choose another --out") from error
    return path


def _address(name: str) -> str:
    """Where timm's default weights of a network are, of safetensors where there are any."""
    config = timm_library().get_pretrained_cfg(name)
    if config is not None and config.hf_hub_id:
        try:
            from huggingface_hub import hf_hub_url
        except ImportError:
            pass
        else:
            return hf_hub_url(config.hf_hub_id, "model.safetensors")
    if config is None or not str(config.url or "").startswith("https://"):
        raise NetworkError(f"timm names no weights for {name}: bring a file of them, and name it by --weights")
    return str(config.url)


def _download(address: str, path: Path) -> None:
    left = MAX_WEIGHT_BYTES
    with urlopen(address, timeout=_TIMEOUT_S) as answer, path.open("wb") as file:  # noqa: S310 - https alone, see `_address`
        while piece := answer.read(_PIECE):
            left -= len(piece)
            if left < 0:
                raise NetworkError(f"{address}: more than {MAX_WEIGHT_BYTES // 1_000_000} MB; choose a smaller network")
            file.write(piece)
