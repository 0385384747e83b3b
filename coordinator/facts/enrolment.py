"""Facts about enrolment: how far the device of each token has come, and its next step."""

from collections.abc import Iterator

from coordinator.facts.devices import LOOK, DeviceFacts, device_facts
from coordinator.facts.known import Known
from coordinator.members.enrolment import TokenFacts, token_facts
from coordinator.rounds.records import DeviceState, UpdateRecord
from fedcg.sentences import texts
from fedcg.values import Value
from fedcg.wire.messages.schemas import Outcome, SumObstacle

NAMES = ("token made", "enrolled", "doctor ok", "cohort secret and roster", "online", "first update")
DONE, OPEN, FAILED, UNKNOWN = "done", "open", "failed", "not reported"
ENROL = "Run the token's line on the device. If the line is lost, or the token has ended, create a new token."
JOIN = "On the device: `fedcg cohort join`; on the first device of the cohort: `fedcg cohort create`."
RUN = "On the device: `fedcg agent run --config agent.toml`, or start its service."
WAIT = "It takes part in the next round that invites it."


class Step(Value):
    """A step of an enrolment.

    Attributes:
        name: one of `NAMES`.
        state: "done", "open", "failed" or "not reported".
        what: the fact.
        remedy: what to do if it is not done.
    """

    name: str
    state: str
    what: str = ""
    remedy: str = ""


class EnrolmentFacts(TokenFacts, frozen=True):
    """An enrolment token with all steps of its device, in order."""

    steps: list[Step]


def enrolments(known: Known) -> list[EnrolmentFacts]:
    """All tokens, newest first, each with the steps of its device."""
    devices = {each.id: each for each in device_facts(known)}
    overview, federations = known.store.overview, [each.id for each in known.store.federations()]
    updates = {each: overview.last_deliveries(each, outcome=Outcome.ACCEPTED) for each in federations}
    outsiders = {federation: service.cohorts.outsiders() for federation, service in known.services.items()}
    found = []
    for token in known.store.register.tokens()[::-1]:
        device, federation = devices.get(token.used_by or ""), token.federation or ""
        if device is None or device.state is not DeviceState.ENROLLED or device.enrolled_at != token.used_at:
            ended = "the device was revoked, was replaced, or left"
            more = [Step(NAMES[1], OPEN, ended if device else f"the token is {token.state(known.now).value}", ENROL)]
        else:
            update, why = updates.get(federation, {}).get(device.id), outsiders.get(federation, {}).get(device.id, "")
            more = [Step(NAMES[1], DONE), *_reached(known, device, federation, update, why)]
        steps = [Step(NAMES[0], DONE), *more, *(Step(name, OPEN) for name in NAMES[1 + len(more) :])]
        found.append(EnrolmentFacts(**token_facts(token, known.now).model_dump(), steps=steps))
    return found


def _reached(
    known: Known, device: DeviceFacts, federation: str, update: UpdateRecord | None, lacks: str
) -> Iterator[Step]:
    """The further steps of an enrolled device. Nothing counts that an earlier device with its id did."""
    service, is_seen = known.services.get(federation), bool(device.online) or device.last_seen_at is not None
    is_reported = device.findings is not None and is_seen
    told = [each for each in device.findings or () if is_seen and federation in each.federations]  # failed ones first
    if told and told[0].state == "failed":
        yield Step(NAMES[2], FAILED, told[0].what, told[0].remedy)
    else:
        yield _step(NAMES[2], "its owner may not allow `health`", LOOK, is_done=is_reported, otherwise=UNKNOWN)
    lacks = lacks or next((each.what for each in told if "cohort secret" in each.what), "")
    if service is not None and service.sums.refused.get(device.id) is SumObstacle.ROSTER:
        yield Step(NAMES[3], FAILED, *texts().sum_obstacles[SumObstacle.ROSTER.value])
    elif lacks or federation in device.online or is_reported:
        yield _step(NAMES[3], lacks, JOIN, is_done=not lacks)
    else:
        yield Step(NAMES[3], UNKNOWN, "known once it is online", RUN)
    yield _step(NAMES[4], "never seen", RUN, is_done=is_seen)
    is_delivered = update is not None and update.stored_at >= device.enrolled_at
    yield _step(NAMES[5], device.left_out.get(federation, "no accepted update"), WAIT, is_done=is_delivered)


def _step(name: str, what: str, remedy: str, *, is_done: bool, otherwise: str = OPEN) -> Step:
    return Step(name, DONE) if is_done else Step(name, otherwise, what, remedy)
