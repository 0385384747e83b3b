"""Reads a federation's real updates from an observer's recording, or from a coordinator's folder of artifacts.

Such a folder is not trusted: names are checked against sha256, sizes are bounded, tensors must have the spec's layout
and codec.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import cast

from audit.errors import CaptureError, DecodeError
from audit.evidence.case import Colluder, Earlier, View
from audit.recording.observer import ARTIFACTS, WIRE_FILE, gaps
from fedcg.errors import NOT_FOUND
from fedcg.files import file_sha256
from fedcg.learning.aggregation.sealed_means import range_of
from fedcg.learning.errors import LearningError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Aggregate, Weights
from fedcg.learning.networks.plans import on_wire
from fedcg.learning.registry import get_method
from fedcg.learning.spec import FederationSpec
from fedcg.learning.tensor_conversion import to_weights
from fedcg.values import Value
from fedcg.wire.artifacts.artifacts import Artifact, ArtifactHeader, Base, codecs_for, read_header, unpack
from fedcg.wire.artifacts.payload import PartArrays
from fedcg.wire.errors import WireError
from fedcg.wire.messages.schemas import MAX_ARTIFACT_BYTES
from fedcg.wire.parts import Part, Report
from fedcg.wire.sealed_numbers import Numbers
from fedcg.wire.sums import opened_means

_SHA256 = re.compile(r"[0-9a-f]{64}")
_HISTORY = 4  # rounds before the audited one


class RecordedUpdates(Value):
    """The artifacts of one federation.

    Attributes:
        headers: of updates and aggregates, by id.
        gaps: missing data according to the recording, in words.
    """

    folder: Path
    spec: FederationSpec
    headers: Mapping[str, ArtifactHeader]
    gaps: tuple[str, ...]

    def updates(self) -> dict[tuple[str, int], str]:
        """Return the update of each client and round, by (client, round): that of the last attempt."""
        found = [(one.client, one.round, one.attempt, id_) for id_, one in self.headers.items() if one.kind == "update"]
        return {(client, number): id_ for client, number, _, id_ in sorted(found)}

    def view(
        self,
        client: str | None = None,
        round_number: int | None = None,
        auxiliary: ImageSet | None = None,
        secret: bytes | None = None,
    ) -> View:
        """Return an attacker's view of one client in one round.

        Args:
            client: None selects the only client in the folder.
            round_number: None selects the last round in which the client trained, else its last round.
            auxiliary: the attacker's own labelled images.
            secret: the cohort's secret, for an attacker with the help of one of its devices; it opens the means in
                sealed sums.

        Raises:
            CaptureError: no such update, or its base aggregate is missing.
            DecodeError: an artifact does not match the spec.
        """
        there = self.updates()
        clients = sorted({name for name, _ in there})
        if client is None and len(clients) != 1:
            raise CaptureError(
                f"{self.folder} holds updates of {', '.join(clients) or 'no client'}: name one with --client"
            )
        client = client or clients[0]
        rounds = sorted(number for name, number in there if name == client)
        round_number = round_number or max(rounds, key=lambda one: (self.spec.trains_in(one), one), default=0)
        if (client, round_number) not in there:
            raise CaptureError(
                f"{self.folder} holds no update of {client}{f' in round {round_number}' if rounds else ''}; it has "
                + (f"rounds {', '.join(map(str, rounds))}" if rounds else f"clients {', '.join(clients) or '(none)'}"),
                exit_code=NOT_FOUND,
            )
        artifact = there[client, round_number]
        header = self.headers[artifact]
        base = self._base(header)
        before = self._aggregate(base.id, secret)
        return View(
            self.spec,
            client,
            round_number,
            self._update(artifact, base),
            before,
            self._updates(round_number, there, without=client),
            header.report or Report(),
            auxiliary,
            artifact=artifact,
            colluder=None if secret is None else Colluder.of(self.spec, secret, before.parts),
            history=self._history(client, round_number, there, secret),
        )

    def _history(
        self, client: str, number: int, there: Mapping[tuple[str, int], str], secret: bytes | None
    ) -> tuple[Earlier, ...]:
        """Return the recorded rounds directly before this one, at most four, until one in which something is missing."""
        found: list[Earlier] = []
        with suppress(CaptureError, DecodeError):
            for at in range(number - 1, max(0, number - _HISTORY - 1), -1):
                mine = there.get((client, at))
                if mine is None or not self.spec.trains_in(at):
                    break
                own = {client: self._update(mine, self._base(self.headers[mine]))}
                updates = own | self._updates(at, there, without=client)
                found.insert(0, Earlier(self._aggregate(self._base(self.headers[mine]).id, secret), updates))
        return tuple(found)

    def _updates(
        self, number: int, there: Mapping[tuple[str, int], str], without: str
    ) -> dict[str, dict[Part, Weights]]:
        """Return the updates of a round's other clients, without those that can't be read: no client stops the audit of another."""
        found = {}
        for (name, at), id_ in there.items():
            if at == number and name != without:
                with suppress(DecodeError, CaptureError):
                    found[name] = self._update(id_, self._base(self.headers[id_]))
        return found

    def _base(self, header: ArtifactHeader) -> Base:
        if header.base is None or header.base not in self.headers or self.headers[header.base].kind != "aggregate":
            raise CaptureError(
                f"{self.folder} lacks aggregate {header.base}, which the update of {header.client} in round {header.round} "
                "builds on: start recording before the round, or use the coordinator's artifacts"
            )
        return Base(header.base, self._decoded(header.base).parts)

    def _update(self, id_: str, base: Base) -> dict[Part, Weights]:
        """Return what an attacker can read in an update: nothing behind masks."""
        return _readable(self._decoded(id_, base).parts)

    def _aggregate(self, id_: str, secret: bytes | None) -> Aggregate:
        decoded = self._decoded(id_)
        parts, header = _readable(decoded.parts), decoded.header
        opened, refused = set[Part](), None
        for one in sorted({some.parts for some in header.sums} if secret is not None else ()):
            sealed = cast("Mapping[str, Numbers]", decoded.parts[Part.SEALED])
            groups = [some for some in header.sums if some.parts == one]
            try:
                means = opened_means(
                    sealed, groups, self.spec.federation, secret or b"", self.spec.layouts, range_of(self.spec)
                )
                parts |= to_weights(means)
                opened |= means.keys()
            except WireError as error:
                refused = refused or error
        if refused and not opened:  # else the sum is from before `fedcg cohort renew`; this attacker does not use it
            raise DecodeError(f"the sealed sum in the aggregate of round {header.round}: {refused}") from refused
        return Aggregate(parts, header.label_distribution)

    def _decoded(self, id_: str, base: Base | None = None) -> Artifact:
        spec, header, method = self.spec, self.headers[id_], get_method(self.spec.method)
        down = on_wire(method.payload.down, frozenset(spec.sealed))
        is_down = header.kind == "aggregate"
        layouts = {part: spec.layouts[part] for part in sorted(down)} if is_down else spec.update_layouts(header.round)
        codec = spec.aggregate_codec if is_down else spec.codec
        with_base = [part for part in spec.with_base if part in layouts]
        known = None if base is None or not with_base else Base(base.id, {part: base.parts[part] for part in with_base})
        codecs = codecs_for(layouts, codec, frozenset() if known is None else frozenset(known.parts))
        try:
            return unpack((self.folder / id_).read_bytes(), layouts, codecs=codecs, base=known)
        except (WireError, OSError) as error:
            what = f"the {header.kind} of {header.client} in round {header.round} ({id_[:12]})"
            raise DecodeError(f"{what} does not match the federation's spec: {error}") from error


def _readable(parts: PartArrays) -> dict[Part, Weights]:
    return to_weights({part: tensors for part, tensors in parts.items() if part is not Part.SEALED})


def read_updates(folder: Path, federation: str | None = None) -> RecordedUpdates:
    """Read the updates in an observer's folder, a coordinator's home, or any folder of artifacts that are named by their sha256.

    Args:
        folder: the folder.
        federation: its id; needed if there are several.

    Raises:
        CaptureError: no such folder, or not exactly one matching spec in it.
        DecodeError: a file does not match its name, or is too large.
    """
    place = folder / ARTIFACTS if (folder / ARTIFACTS).is_dir() else folder
    if not place.is_dir():
        raise CaptureError(
            f"{folder}: no such folder; give an observer's folder or a coordinator's artifacts", exit_code=NOT_FOUND
        )
    specs: dict[str, FederationSpec] = {}
    headers: dict[str, ArtifactHeader] = {}
    for path in sorted(path for path in place.iterdir() if _SHA256.fullmatch(path.name)):
        if path.stat().st_size > MAX_ARTIFACT_BYTES:
            raise DecodeError(f"{path} is larger than any artifact ({MAX_ARTIFACT_BYTES} bytes)")
        if file_sha256(path) != path.name:
            raise DecodeError(f"{path} is damaged: its sha256 is not its name")
        data = path.read_bytes()
        try:
            if data[:1] == b"{":
                spec = FederationSpec.parse(data)
                specs[spec.federation] = spec
            else:
                headers[path.name] = read_header(data)
        except (WireError, ValueError, LearningError):
            continue  # a coordinator's folder also holds its own states
    spec = _chosen(specs, federation, folder)
    strange = sorted({one.federation for one in headers.values()} - specs.keys())
    if strange and not any(one.federation == spec.federation for one in headers.values()):
        raise CaptureError(f"{folder} holds updates of {', '.join(strange)}, but the spec of {spec.federation}")
    mine = {id_: one for id_, one in headers.items() if one.federation == spec.federation}
    return RecordedUpdates(place, spec, mine, gaps(folder / WIRE_FILE))


def _chosen(specs: Mapping[str, FederationSpec], federation: str | None, folder: Path) -> FederationSpec:
    names = sorted(specs)
    if federation is None and len(names) == 1:
        return specs[names[0]]
    if federation is not None and federation in specs:
        return specs[federation]
    if not names:
        raise CaptureError(f"{folder} holds no spec: give an observer's folder or a coordinator's artifacts")
    wanted = f"no federation {federation}" if federation else f"{len(names)} federations: name one with --federation"
    raise CaptureError(f"{folder} holds {wanted}; it holds {', '.join(names)}")
