"""Attacks an update on the device that trained it, before it is stored for sending, and applies the owner's gate. Uses torch.

The report of the last audit is in the folder `audit` of the private store. It shows images of the device and is never sent.
"""

import time
from collections.abc import Callable
from pathlib import Path

from audit.attacks.attack import Attack, Effort, carried_out, chosen_attacks
from audit.choices import parse_gate
from audit.evidence import Case, Truth, View, joined, with_images
from audit.measures import Outcome
from audit.report import PAGE_FILE, GateResult, findings_of, judge, largest_gains, subject_of, write_report
from edge_client.config import AgentConfig
from edge_client.errors import RoundError
from edge_client.store.private_store import AUDIT_FOLDER
from edge_client.training.local_data import RoundData
from fedcg.learning.data.image_folder import read_images
from fedcg.learning.errors import DataError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Aggregate, Parts
from fedcg.learning.privacy import PrivacySettings
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.learning.tensor_conversion import to_weights
from fedcg.text_output import command_line
from fedcg.values import Value
from fedcg.wire.artifacts.artifacts import Artifact, Base, codecs_for, unpack
from fedcg.wire.messages.schemas import DeclineReason
from fedcg.wire.parts import AuditFigure, Report


class Release(Value):
    """An update before it is stored for sending, and the ground truth.

    Attributes:
        update: its bytes.
        base: the aggregate that the round started from, decoded.
        before: all parts of the client at the start of the round; `after`: at its end.
        streams: of the round.
    """

    spec: FederationSpec
    update: bytes
    base: Base
    label_distribution: tuple[float, ...] | None
    data: RoundData
    before: Parts
    after: Parts
    streams: Streams


class Judged(Value):
    """The result of an audit.

    Attributes:
        gains: by figure, the upper end of the gain's interval.
        failed: gate conditions that are not met; `not_run`: attacks that failed, with their errors.
        page: the report.
    """

    gains: dict[AuditFigure, float]
    failed: tuple[GateResult, ...]
    not_run: tuple[str, ...]
    page: Path

    def check(self) -> None:
        """Check the gate.

        Raises:
            RoundError: the update may not leave; names each failed condition with value and setting. The text stays on the device.
        """
        if self.failed:
            reasons = "; ".join(f"{one.condition}: {one.why}" for one in self.failed)
            reasons = reasons.replace("--auxiliary", "[audit] auxiliary")  # the name of the setting on a device
            raise RoundError(
                DeclineReason.WITHHELD,
                f"the update was audited and not sent: {reasons}. Report: {self.page}. "
                "Change what is allowed with [audit] gate, or what leaks with [privacy], in agent.toml",
            )


def audit_release(config: AgentConfig, release: Release, progress: Callable[[str, int, int], None]) -> Judged:
    """Attack an update as a coordinator could, judge the gate, and write the report into the private store.

    Args:
        config: its `[audit]`.
        release: the update.
        progress: called with ("audit", step, steps) every few seconds, in hundredths of an attack.

    Raises:
        RoundError: the auxiliary images can't be read, so the configured audit can't run.
        OSError: the report can't be written.
    """
    attacks = chosen_attacks(config.audit.attacks)
    case = _case(release, _auxiliary(config.audit.auxiliary, release.spec), config.privacy)
    started = time.monotonic()
    outcomes = [
        carried_out(
            attack, case, Effort.QUICK, _hundredths(progress, number, len(attacks)), started + Effort.QUICK.limit_s
        )
        for number, attack in enumerate(attacks)
    ]
    verdicts = judge(parse_gate(config.audit.gate), outcomes)
    page = _write_report(config, case, attacks, outcomes, verdicts, time.monotonic() - started)
    not_run = tuple(f"{one.attack} {one.skipped}" for one in outcomes if one.has_failed)
    return Judged(largest_gains(outcomes), tuple(one for one in verdicts if not one.passed), not_run, page)


def _hundredths(progress: Callable[[str, int, int], None], number: int, count: int) -> Callable[[int, int], None]:
    return lambda done, total: progress("audit", 100 * number + min(100, 100 * done // max(total, 1)), 100 * count)


def _auxiliary(root: Path | None, spec: FederationSpec) -> ImageSet | None:
    if root is None:
        return None
    try:
        return read_images(root, spec.classes, spec.input).images
    except DataError as error:
        raise RoundError(DeclineReason.WITHHELD, f"[audit] auxiliary: {error}; nothing was sent") from error


def _case(release: Release, auxiliary: ImageSet | None, privacy: PrivacySettings) -> Case:
    """The update as a coordinator decodes it, and the ground truth."""
    sent, private = _decoded(release), get_method(release.spec.method).payload.private
    view = View(
        with_images(release.spec),
        sent.header.client or "",
        sent.header.round,
        to_weights(sent.parts),
        Aggregate(to_weights(release.base.parts), release.label_distribution),
        report=sent.header.report or Report(),
        auxiliary=auxiliary,
    )
    before, after = ({part: parts[part] for part in private} for parts in (release.before, release.after))
    unseen = joined(release.data.val, release.data.test)
    truth = Truth(release.data.train, unseen, before, after, privacy=privacy)
    return Case(view, truth, release.streams.at("audit"))


def _decoded(release: Release) -> Artifact:
    spec, base = release.spec, release.base
    layouts = {part: spec.layouts[part] for part in spec.upload}
    known = Base(base.id, {part: base.parts[part] for part in spec.with_base}) if spec.with_base else None
    return unpack(release.update, layouts, codecs=codecs_for(layouts, spec.codec, spec.with_base), base=known)


def _write_report(
    config: AgentConfig,
    case: Case,
    attacks: tuple[Attack, ...],
    outcomes: list[Outcome],
    verdicts: tuple[GateResult, ...],
    seconds: float,
) -> Path:
    folder = config.store / AUDIT_FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    settings = {"effort": Effort.QUICK.value, "attacks": list(config.audit.attacks), "gate": config.audit.gate}
    subject = subject_of(case, (), settings, _command(config, case.view.round), config.store, seconds)
    write_report(folder, subject, findings_of(attacks, outcomes), verdicts)
    return folder / PAGE_FILE


def _command(config: AgentConfig, number: int) -> str:
    """The command for a longer audit of the same update, once it has been sent."""
    of_device = {"data": config.data.root, "private": config.store, "client": config.device}
    return command_line("audit", "run", updates="OBSERVED", round=number, out="OUT", **of_device)
