"""FedCG Edge: the code that all sides of a federation share, the command `fedcg`, and what a program of one's own imports from here (docs/how-to/python.md).

Nothing is imported before it is used.
"""

from importlib import import_module

_FACE = {
    "Audit": "experiments.audit_face:Audit",
    "Client": "fedcg.learning.client:Client",
    "Run": "experiments.face:Run",
    "Trainer": "fedcg.learning.networks.task:Trainer",
    "TrainerContext": "fedcg.learning.networks.task:TrainerContext",
    "Split": "fedcg.learning.networks.cut:Halves",
    "audit": "experiments.audit_face:audit",
    "signals": "fedcg.learning.data.frames:signals",
    "simulate": "experiments.face:simulate",
    "split": "fedcg.learning.networks.cut:split",
    "table": "fedcg.learning.data.frames:table",
}
__all__ = [*_FACE]


def __getattr__(name: str) -> object:
    if name not in _FACE:
        raise AttributeError(f"module 'fedcg' has no attribute {name!r}; there are {', '.join(_FACE)}")
    module, _, attribute = _FACE[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_FACE})
