"""The data of a simulation, in memory: the very deal that a demo of the same seed writes into its clients' folders. Uses torch."""

from __future__ import annotations

from experiments.data.client_datasets import Cohort, build_cohort
from experiments.data.deal import DealOptions
from experiments.data.source import Source
from experiments.errors import SourceError
from experiments.settings.options import root_secret
from experiments.simulation.batch import RunSetting
from experiments.simulation.wire_codec import coding_of
from fedcg.learning.registry import get_method
from fedcg.learning.simulation.party import Party, Roots
from fedcg.learning.spec import FederationSpec, ImageForm


class Cohorts:
    """Builds cohorts and keeps the last one: the next run is mostly another method on the same images."""

    def __init__(self) -> None:
        self._last: tuple[tuple[str, DealOptions, ImageForm], Cohort] | None = None

    def get(self, run: RunSetting, source: Source, spec: FederationSpec) -> Cohort:
        """The images of a run's clients.

        Raises:
            SourceError: the data can't be used, or not in this way.
        """
        deal = run.deal()
        key = run.data, deal, spec.image
        if self._last is None or self._last[0] != key:
            self._last = None  # two of them need not fit into memory
            self._last = key, build_cohort(source, spec.image, deal)
        return self._last[1]


def party_of(run: RunSetting, spec: FederationSpec, cohort: Cohort) -> Party:
    """Everybody who takes part in a run.

    Raises:
        SourceError: the method's server needs public images, and none were held out.
    """
    if cohort.public is None and get_method(spec.method).needs_public:
        raise SourceError(f"{spec.method} distils on unlabelled public images: hold some out with --public-images N")
    roots = roots_of(run.seed, tuple(sorted(cohort.clients)))
    # Test images dealt out evenly are the common set: clients are measured on their own share, the average of them on all.
    common = None if run.test == "even" else cohort.common
    coding = coding_of(spec)
    return Party(spec, cohort.clients, roots, common, run.device, cohort.public, run.precision, coding)


def roots_of(seed: int, clients: tuple[str, ...]) -> Roots:
    """The roots that a demo of this seed writes into its processes' folders."""
    devices = {client: root_secret(seed, f"device {client}") for client in clients}
    return Roots(root_secret(seed, "cohort"), root_secret(seed, "coordinator"), devices)
