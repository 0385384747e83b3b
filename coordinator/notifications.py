"""Notifications about problems that open or close: webhook, e-mail, and MQTT, where Home Assistant discovers the fleet.

`[notify]` in coordinator.toml sets the channels. Both changes of a problem are also written into the event log.
"""

import asyncio
import json
import logging
import smtplib
import ssl
import time
import urllib.request
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from email.message import EmailMessage
from urllib.parse import urlsplit

from coordinator.config import LOOPBACK_HOSTS, NotifySettings
from coordinator.errors import NotFoundError
from coordinator.facts.devices import device_facts
from coordinator.facts.federations import current_round
from coordinator.facts.known import Known
from coordinator.facts.problems import Problem, open_problems
from coordinator.paths import Home
from fedcg.event_log import EventLog
from fedcg.values import Value
from fedcg.wire.transport.publish import publish

LOOK_EVERY_S = 10.0
SETTLED_LOOKS = 2
"""Consecutive looks that must agree before a problem opens or closes, so that brief problems are not reported."""
TIMEOUT_S = 5.0
MAX_UNSENT = 100
"""Notices kept for an unavailable receiver; the oldest ones are dropped."""
REPEAT_S = 60.0
"""The fleet is published again after this time; Home Assistant shows "unavailable" after three times as long."""
MAX_SHOWN = 1000
"""Devices in one publication of the fleet."""

log = logging.getLogger(__name__)


class Notice(Value):
    """A problem that opened or closed."""

    event: str
    problem: Problem

    @property
    def content(self) -> dict[str, object]:
        """Its fields as JSON values."""
        return {"event": self.event, **asdict(self.problem)}


TEST = Notice("test", Problem("test", "coordinator", "this is a test of the notifications", "Nothing has to be done."))


class Channel(ABC):
    """A way to notify.

    Attributes:
        target: the receiver without passwords.
        sent_at: unix time of the last accepted notice; None if there was none.
        failure: why the receiver did not accept the last attempt; empty if it did.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.sent_at: float | None = None
        self.failure = ""
        self.unsent: deque[Notice] = deque(maxlen=MAX_UNSENT)

    @abstractmethod
    def send(self, notices: deque[Notice], known: Known) -> None:
        """Send notices and remove those that the receiver accepted; may send nothing yet.

        Raises:
            OSError: the receiver did not accept them.
        """

    def attempt(self, notices: deque[Notice], known: Known) -> bool:
        """Send notices and record the outcome. False if the receiver did not accept them: they are sent with the next ones."""
        before = len(notices)
        try:
            self.send(notices, known)
        except OSError as error:
            failure = str(error).removeprefix("<urlopen error ").removesuffix(">")[:300] or type(error).__name__
            if failure != self.failure:
                log.warning("%s accepted no notification: %s", self.target, failure)
            self.failure = failure
            return False
        if len(notices) < before:
            self.sent_at, self.failure = time.time(), ""
        return True


class Webhook(Channel):
    """Posts each notice as a JSON object to a URL."""

    def send(self, notices: deque[Notice], known: Known) -> None:
        """Post the notices one by one."""
        while notices:
            request = urllib.request.Request(  # noqa: S310 - the configuration allows http and https only
                self.target,
                json.dumps(notices[0].content).encode(),
                {"Content-Type": "application/json", "User-Agent": "fedcg-edge"},
            )
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):  # noqa: S310 - as above
                notices.popleft()


class Email(Channel):
    """Sends the notices of some minutes in one e-mail, over TLS unless the server is on this machine."""

    def __init__(self, settings: NotifySettings, password: str) -> None:
        self._server, self._password = urlsplit(settings.smtp or ""), password
        self._sender, self._receivers = settings.mail_from or "", settings.mail_to
        self._pause_s = 60 * settings.mail_minutes
        super().__init__(f"{', '.join(self._receivers)} by {self._server.hostname}")

    def send(self, notices: deque[Notice], known: Known) -> None:
        """Send one e-mail, unless the last one was a short time ago."""
        is_test = TEST in notices
        if not notices or (not is_test and time.time() - (self.sent_at or 0) < self._pause_s):
            return
        problems = [(one.event.rpartition("_")[2], one.problem) for one in notices]
        message = EmailMessage()
        message["From"], message["To"] = self._sender, ", ".join(self._receivers)
        first, more = problems[0], len(problems) - 1
        subject = f"FedCG Edge: {first[0]}: {first[1].key}" + (f" and {more} more" if more else "")
        message["Subject"] = " ".join(subject.split())[:200]
        lines = (f"{event}: {one.key}\n{one.what}\n{one.remedy}\n{one.docs}" for event, one in problems)
        message.set_content("\n\n".join(lines) + "\n")
        with self._connected() as server:
            server.send_message(message)
        notices.clear()

    def _connected(self) -> smtplib.SMTP:
        host, context = self._server.hostname or "", ssl.create_default_context()
        if self._server.scheme == "smtps":
            server: smtplib.SMTP = smtplib.SMTP_SSL(host, self._server.port or 465, timeout=TIMEOUT_S, context=context)
        else:
            server = smtplib.SMTP(host, self._server.port or 587, timeout=TIMEOUT_S)
            if host not in LOOPBACK_HOSTS:
                server.starttls(context=context)
        if self._server.username:
            server.login(self._server.username, self._password)
        return server


class HomeAssistant(Channel):
    """Publishes the fleet by MQTT as Home Assistant's discovery describes it, and each notice to TOPIC/problem.

    https://www.home-assistant.io/integrations/mqtt/#mqtt-discovery
    """

    def __init__(self, settings: NotifySettings, password: str) -> None:
        self._server, self._password, self._topic = urlsplit(settings.mqtt or ""), password, settings.mqtt_topic
        self._shown: Mapping[str, str] = {}
        self._shown_at = 0.0
        super().__init__(f"{self._server.scheme}://{self._server.hostname} {self._topic}/")

    def send(self, notices: deque[Notice], known: Known) -> None:
        """Publish what changed in the fleet, everything once a minute, and the notices."""
        fleet = dict(fleet_topics(known, self._topic))
        is_due = time.monotonic() - self._shown_at > REPEAT_S
        changed = {name: text for name, text in fleet.items() if is_due or self._shown.get(name) != text}
        gone = dict.fromkeys(self._shown.keys() - fleet.keys(), "")  # an empty text removes a kept one
        messages = [(name, text, True) for name, text in {**changed, **gone}.items()]
        messages += [(f"{self._topic}/problem", json.dumps(one.content), False) for one in notices]
        if messages:
            publish(self._server, self._password, messages)
            self._shown, self._shown_at = fleet, time.monotonic() if is_due else self._shown_at
        notices.clear()


def fleet_topics(known: Known, topic: str) -> Iterator[tuple[str, str]]:
    """Yield topics and texts: discovery and state of each device, each federation, and the open problems."""
    problems = open_problems(known)
    about = [f"{one.key}: {one.what}" for one in problems[:20]]
    yield from _entity(topic, "sensor", "problems", "Open problems", str(len(problems)), {"problems": about})
    for device in device_facts(known)[:MAX_SHOWN]:
        is_online = "ON" if device.standing == "online" else "OFF"
        more = {"standing": device.standing, "agent": device.agent}
        yield from _entity(topic, "binary_sensor", f"device_{device.id}", device.id, is_online, more)
    for record in known.store.shown_federations():
        facts = current_round(known, record.id)
        more = {name: getattr(facts, name) for name in ("status", "phase", "rounds", "online")}
        name, title = f"federation_{record.id}", f"Round of {record.id}"
        yield from _entity(topic, "sensor", name, title, str(facts.round), more)


def _entity(
    topic: str, kind: str, name: str, title: str, state: str, more: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    place = f"{topic}/{name}"
    config = {
        "name": title,
        "unique_id": f"{topic}_{name}",
        "state_topic": f"{place}/state",
        "json_attributes_topic": f"{place}/attributes",
        "expire_after": int(3 * REPEAT_S),
        "device": {"identifiers": [topic], "name": "FedCG Edge", "manufacturer": "FedCG Edge"},
    }
    if kind == "binary_sensor":
        config["device_class"] = "connectivity"
    yield f"homeassistant/{kind}/{topic}/{name}/config", json.dumps(config)
    yield f"{place}/state", state
    yield f"{place}/attributes", json.dumps(more)


class ChannelFacts(Value):
    """A channel: name, receiver, unix time of the last accepted notice, why the last one was refused, and the number of waiting ones."""

    name: str
    target: str
    sent_at: float | None
    failure: str
    waiting: int


class Notifier(Value):
    """The channels of a coordinator by name: webhook, mail, mqtt."""

    channels: Mapping[str, Channel]

    @staticmethod
    def of(home: Home) -> "Notifier":
        """Return the channels that coordinator.toml sets; files with passwords are relative to the coordinator's directory.

        Raises:
            ConfigError: a file with a password can't be read.
        """
        settings, found = home.config().notify, dict[str, Channel]()
        if settings.webhook is not None:
            found["webhook"] = Webhook(settings.webhook)
        if settings.smtp is not None:
            found["mail"] = Email(settings, home.password("notify", settings.smtp_password_file))
        if settings.mqtt is not None:
            found["mqtt"] = HomeAssistant(settings, home.password("notify", settings.mqtt_password_file))
        return Notifier(found)

    def facts(self) -> list[ChannelFacts]:
        """The state of each channel."""
        return [
            ChannelFacts(name, one.target, one.sent_at, one.failure, len(one.unsent))
            for name, one in self.channels.items()
        ]

    def test(self, name: str, known: Known) -> Channel:
        """Send a test to a channel now; its `failure` says why it was not accepted, if it was not.

        Raises:
            NotFoundError: the channel is not set.
        """
        if name not in self.channels:
            there = ", ".join(self.channels) or "none"
            raise NotFoundError(f"no channel {name[:40]!r} is set under [notify] in coordinator.toml; set are: {there}")
        self.channels[name].attempt(deque([TEST]), known)
        return self.channels[name]


class ProblemWatch:
    """Detects which problems opened and closed between looks.

    Args:
        settled_looks: consecutive looks that must agree.
    """

    def __init__(self, settled_looks: int = SETTLED_LOOKS) -> None:
        self._settled_looks = settled_looks
        self._open: dict[str, Problem] = {}
        self._looks: dict[str, int] = {}

    def look(self, there: list[Problem]) -> tuple[list[Problem], list[Problem]]:
        """Take the present problems; returns those that opened and those that closed."""
        now = {each.key: each for each in there}
        # for keys that are about to change
        self._looks = {key: self._looks.get(key, 0) + 1 for key in now.keys() ^ self._open.keys()}
        settled = {key for key, looks in self._looks.items() if looks >= self._settled_looks}
        opened = [now[key] for key in sorted(settled & now.keys())]
        closed = [self._open[key] for key in sorted(settled - now.keys())]
        for each in opened:
            self._open[each.key] = each
        for each in closed:
            del self._open[each.key]
        return opened, closed


@asynccontextmanager
async def watching(
    known: Callable[[], Known], events: EventLog, notifier: Notifier, every_s: float = LOOK_EVERY_S
) -> AsyncIterator[None]:
    """Check for problems while the context is open.

    Args:
        known: returns the source of all facts.
        events: the event log.
        notifier: the channels.
        every_s: seconds between two looks.
    """
    watch = ProblemWatch()

    def look() -> None:
        sources = known()
        opened, closed = watch.look(open_problems(sources))
        for name, problems in (("problem_opened", opened), ("problem_closed", closed)):
            for each in problems:
                events.write(name, kind=each.kind, subject=each.subject, what=each.what)
                for channel in notifier.channels.values():
                    channel.unsent.append(Notice(name, each))
        for channel in notifier.channels.values():
            channel.attempt(channel.unsent, sources)

    async def repeat() -> None:
        while True:
            try:
                await asyncio.to_thread(look)
            except Exception:  # a view must not end the coordinator; the next look tries again
                log.exception("can't determine the open problems")
            await asyncio.sleep(every_s)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
