"""Whether the packages of the extra `fedcg-edge[audit]` are there. Torch-free."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = {
    "jinja2": "jinja2",
    "scipy": "scipy",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "torch": "torch",
}
EXTRA = "fedcg-edge[audit]"


def missing_packages() -> tuple[str, ...]:
    """The packages that an audit needs and that are not installed, by the names that pip takes."""
    return tuple(package for module, package in PACKAGES.items() if find_spec(module) is None)
