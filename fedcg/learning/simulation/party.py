"""The participants of a simulation: all clients' images, secrets and the spec. Constant during a run; does not train."""

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Protocol

import torch

from fedcg.learning.defences.scrambling import Scrambling
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Cohort, Machine, Parts, RoundContext
from fedcg.learning.privacy import OFF, PrivacySettings
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.values import Value

ATTEMPT = 1  # a simulated round is never retried


class ClientData(Value):
    """One client's images for training, validation and test.

    Attributes:
        input_layer: of the client's data defence. These images have passed through it; any other input of the model
            must pass too.
        common: the party's common test set as features of this client's own backbone; None: the party's images.
    """

    train: ImageSet
    val: ImageSet
    test: ImageSet
    input_layer: Scrambling | None = None
    common: ImageSet | None = None

    def seen(self, images: ImageSet) -> ImageSet:
        """Real images as input of the client's model."""
        return images if self.input_layer is None else self.input_layer.seen(images)


class Roots(Value):
    """The roots of randomness (design §5): the secrets of each device, the cohort and the coordinator.

    Attributes:
        starts: by client, the root of its private parts' initial weights, if it is not the cohort's.
    """

    cohort: bytes
    coordinator: bytes
    devices: Mapping[str, bytes]
    starts: Mapping[str, bytes] = field(default_factory=dict)


class Coding(Protocol):
    """Simulates the wire's number formats. Laws: it can be pickled; the same parts give the same numbers."""

    def aggregate(self, parts: Parts) -> tuple[Parts, int]:
        """The aggregate as decoded on both sides, and its size in bytes.

        Raises:
            DivergedError: it can't be coded.
        """

    def update(self, client: str, parts: Parts, base: Parts) -> tuple[Parts, int]:
        """A client's update as the server decodes it, and its size in bytes; `base` is the round's starting aggregate.

        Raises:
            DivergedError: it can't be coded.
        """


class Party(Value):
    """The constants of a simulation, passed to every worker once.

    Attributes:
        spec: the complete spec.
        datasets: per client.
        roots: the secrets of all participants.
        common: a common test set, if there is one.
        device: torch device of all training.
        public: [N, C, H, W] uint8 without labels, for the server half of methods that use it.
        coding: number formats of updates and aggregates; None: no conversion.
        privacy: the mechanisms of the clients, except those in `undefended`.
        own: by client, the spec with its own backbone, if backbones differ (`own_backbone`).
    """

    spec: FederationSpec
    datasets: Mapping[str, ClientData]
    roots: Roots
    common: ImageSet | None = None
    device: str = "cpu"
    public: torch.Tensor | None = None
    coding: Coding | None = None
    privacy: PrivacySettings = OFF
    own: Mapping[str, FederationSpec] = field(default_factory=dict)
    undefended: frozenset[str] = frozenset()

    def privacy_of(self, client: str) -> PrivacySettings:
        """The mechanisms of a client."""
        return OFF if client in self.undefended else self.privacy

    def spec_of(self, client: str) -> FederationSpec:
        """The spec under which a client trains."""
        return self.own.get(client, self.spec)

    def common_of(self, client: str) -> ImageSet | None:
        """The common test set as input of a client's model; None without one."""
        if self.common is None:
            return None
        data = self.datasets[client]
        return data.seen(self.common) if data.common is None else data.common

    def client_context(self, client: str, number: int) -> RoundContext:
        """The context of a client in a round."""
        context = self._context(self.roots.devices[client], number, None)
        cohort = Cohort(Streams(self.roots.cohort).at(self.spec.federation))
        validation = self.datasets[client].val
        mine = self.privacy_of(client)
        privacy = mine if self.spec.classes else mine.without_balance()
        return replace(context, spec=self.spec_of(client), privacy=privacy, validation=validation, cohort=cohort)

    def server_context(self, number: int) -> RoundContext:
        """The context of the server half in a round."""
        return self._context(self.roots.coordinator, number, self.public)

    def _context(self, root: bytes, number: int, public: torch.Tensor | None) -> RoundContext:
        streams = Streams(root).at(self.spec.federation, number, ATTEMPT)
        machine = Machine(self.device)
        return RoundContext(self.spec, number, ATTEMPT, streams, machine, public=public)
