"""This device's own program (`[training] program`) in the training process: its data, and its network bound to the spec. Uses torch.

It only runs if its code is what the owner has allowed (`edge_client.store.owner_record`).
"""

from dataclasses import dataclass, field

from edge_client.errors import RoundError
from edge_client.store.owner_record import Consent
from edge_client.store.private_store import PrivateStore
from fedcg.learning.client import Client
from fedcg.learning.data.array_files import ArrayData
from fedcg.learning.errors import DataError, NetworkError, ProgramError
from fedcg.learning.program import Program
from fedcg.learning.seeds import Streams, spec_root
from fedcg.learning.spec import PROGRAM, TRAINER, FederationSpec
from fedcg.wire.messages.schemas import DeclineReason


@dataclass(eq=False)
class OwnProgram:
    """The program of a device.

    Args:
        program: by its name.
        device: its id, passed to the program.
        store: has the owner's consent and the cohort secret, if any.

    Attributes:
        digest: sha256 of the imported code; empty before the import.
    """

    program: Program
    device: str
    store: PrivateStore
    digest: str = field(default="", init=False)
    _bound: dict[str, FederationSpec] = field(default_factory=dict, init=False)
    _stated: dict[str, str] = field(default_factory=dict, init=False)

    def bound(self, spec: FederationSpec) -> FederationSpec:
        """The spec with the program's network; unchanged if the spec has another network.

        Raises:
            RoundError: the owner has not allowed this code.
            LearningError: the program fails, or its network or classes differ from the spec.
        """
        if spec.network.split not in (PROGRAM, TRAINER):
            return spec
        if spec.digest not in self._bound:
            client = self._client(spec)
            if tuple(client.classes) != spec.classes:
                raise NetworkError(
                    f"program {self.program.name} has the classes {', '.join(client.classes)}, but the federation has {', '.join(spec.classes)}"
                )
            network = client.bound(spec.network, spec.input, self.device)
            self._stated[spec.digest] = str(client.model)
            self._bound[spec.digest] = spec.model_copy(update={"network": network})
        return self._bound[spec.digest]

    def arrays(self, spec: FederationSpec) -> ArrayData:
        """The program's current data.

        Raises:
            DataError: samples can't be used for training, or have another form than the spec's.
            RoundError, LearningError: as in `bound`.
        """
        client = self._client(spec)
        if self._stated.setdefault(spec.digest, str(client.model)) != str(client.model):
            self._bound.clear()
            self._stated.clear()
            raise ProgramError(f"program {self.program.name} defines a new network: the next round uses it")
        found = client.arrays(self.device)
        for part, rows in found.parts().items():
            if (form := client.form(rows.images)) != spec.input:
                raise DataError(f"{part}: inputs are {form.in_words}, but the federation's are {spec.input.in_words}")
        return found

    def _client(self, spec: FederationSpec) -> Client:
        digest = self.program.digest()
        if Consent(self.store.root).read().programs.get(spec.digest) != digest:
            raise RoundError(DeclineReason.NEEDS_APPROVAL, f"the code of program {self.program.name} has changed")
        if self.digest not in ("", digest):
            self.program.forget()
            self._bound.clear()
            self._stated.clear()
        self.digest = digest
        root = self.store.cohort_secret() or spec_root(spec.seed)
        return self.program.client(self.device, Streams(root).at(spec.federation, "initial").seed("program"))
