"""Runs the coordinator of a home: connects its components and serves until SIGTERM or SIGINT."""

import asyncio
import signal
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import uvicorn
from starlette.datastructures import State

from coordinator.aggregation.jobs import WorkerSettings
from coordinator.broker.access_lists import are_lists_pending, end_silences, silence
from coordinator.config import CoordinatorConfig, check_api_host
from coordinator.errors import HomeError
from coordinator.facts.known import known_of
from coordinator.http.app import Beside, create_app
from coordinator.http.device_api import bound, create_carrier_app, create_enrolment_app, listening, serving
from coordinator.http.refusals import FailureLimits, ProblemError
from coordinator.members.api_tokens import ApiTokens, local_token
from coordinator.members.membership import Admission
from coordinator.messaging.incoming import LineLimit
from coordinator.notifications import Notifier, watching
from coordinator.page import add_page
from coordinator.paths import Home
from coordinator.pki import authority
from coordinator.pki.signing_keys import SigningIdentity, load_signing_identity
from coordinator.rounds.records import FederationRecord
from coordinator.service.coordinator import ContextOf, Coordinator
from coordinator.service.service_context import ServiceContext
from coordinator.service.tracking import TrackedFederations
from coordinator.storage.artifacts import artifacts_of
from coordinator.storage.database import check_whole, explained
from coordinator.storage.event_store import coordinator_log
from coordinator.storage.locks import sole_writer
from coordinator.storage.store import Store
from fedcg.errors import FedcgError
from fedcg.event_log import EventLog
from fedcg.learning.spec import FederationSpec
from fedcg.listening import Caps, Connections, Listener, http_config, own_hosts_only
from fedcg.wire.messages.schemas import COORDINATOR
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import connection_name
from fedcg.wire.transport.transport import Transport, Will

GRACEFUL_S = 1
REFUSED_S = 3  # before that, longest wait for the refusal of open plans


def run_coordinator(
    home: Home, *, until_finished: bool = False, accepts_loss: bool = False, print_line: Callable[[str], None]
) -> int:
    """Serve until SIGTERM or SIGINT.

    Args:
        home: the coordinator's directory.
        until_finished: exit after the last round.
        accepts_loss: continue with a database that has lost commits.
        print_line: called with one line once the HTTP interface listens.

    Returns:
        The exit code: 0 after a signal or when finished, 1 after a failure.

    Raises:
        HomeError: another coordinator is running there.
        ConfigError: the configuration is invalid.
        StoreError: the database is damaged or has lost commits (the message names them), or database or directory can't be written.
    """
    config = home.require().config()
    home.make_folders()
    home.secret()
    authority.check_pki(home.pki)
    check_api_host(config.api)
    notifier = Notifier.of(home)
    wanted = config.connections
    connections = Connections(Caps(wanted.total, wanted.per_address, wanted.per_device))
    with (
        explained(home),
        sole_writer(home),
        bound("api", config.api.host, config.api.port, connections) as listener,
        listening("enrolment", config.enrolment, config.host_of(config.enrolment), connections) as enrolment,
        listening("carrier", config.carrier, config.host_of(config.carrier), connections) as carrier,
        _opened(home, config, accepts_loss=accepts_loss) as (store, events),
    ):
        authority.renew_clients(home)
        local_token(home, ApiTokens(store.api))
        there = ", ".join(record.id for record in store.shown_federations()) or "no federation yet"
        print_line(f"coordinator of {there} on {config.api.url}")
        if enrolment is not None:
            print_line(f"enrolment on {config.url_of(config.enrolment)}")
        if carrier is not None:
            print_line(f"HTTPS carrier on {config.url_of(config.carrier)}")

        @asynccontextmanager
        async def serve_devices(coordinator: Coordinator) -> AsyncIterator[None]:
            async with AsyncExitStack() as servers:
                if enrolment is not None:
                    await servers.enter_async_context(_enrolment(home, config, coordinator, enrolment))
                if carrier is not None:
                    await servers.enter_async_context(_carrier(home, config, coordinator, carrier))
                known = partial(known_of, coordinator, home.root)
                await servers.enter_async_context(watching(known, events, notifier))
                yield

        coordinator = Coordinator(store, artifacts_of(home), events, _contexts(home, config, store, events))
        return _serve(home, config, coordinator, listener, serve_devices, notifier, until_finished=until_finished)


def _enrolment(
    home: Home, config: CoordinatorConfig, coordinator: Coordinator, listener: Listener
) -> AbstractAsyncContextManager[None]:
    """The server for enrolment and renewal, not yet started."""
    admission = Admission(home, coordinator.store, config, coordinator.events)
    application = create_enrolment_app(admission, FailureLimits(time.monotonic), FailureLimits(time.monotonic))
    own = authority.server_credential(home.pki, "enrolment", config.host_of(config.enrolment))
    return serving(application, listener, authority.server_context(home.pki, own))


def _carrier(
    home: Home, config: CoordinatorConfig, coordinator: Coordinator, listener: Listener
) -> AbstractAsyncContextManager[None]:
    """The HTTPS carrier's server, not yet started."""
    own = authority.server_credential(home.pki, "carrier", config.host_of(config.carrier))
    application = create_carrier_app(coordinator, time.monotonic)
    return serving(application, listener, authority.server_context(home.pki, own, ssl.CERT_REQUIRED))


def _serve(
    home: Home,
    config: CoordinatorConfig,
    coordinator: Coordinator,
    listener: Listener,
    serve_devices: Beside,
    notifier: Notifier,
    *,
    until_finished: bool,
) -> int:
    code = 0

    def request_exit(wanted: int) -> None:
        nonlocal code
        code = max(code, wanted)
        server.should_exit = True

    api = config.api
    application = create_app(
        home,
        coordinator,
        request_exit,
        until_finished=until_finished,
        beside=serve_devices,
        proxy=None if api.proxy is None else str(api.proxy),
    )
    application.state.notifier = notifier
    add_page(application)
    names = (api.host, *api.names)
    setting = "[api] names in coordinator.toml"
    checked = own_hosts_only(application, names, setting, lambda message: ProblemError(400, message).answer("/"))
    tls: dict[str, Any] = (
        {}
        if api.certificate is None or api.key is None
        else {"ssl_certfile": home.root / api.certificate, "ssl_keyfile": home.root / api.key}
    )
    serving_config = http_config(checked, listener, lifespan="on", timeout_graceful_shutdown=GRACEFUL_S, **tls)
    server = _Server(serving_config)
    server.state = application.state
    # uvicorn re-raises the signal that ended it when it is done; this handler makes that a normal exit
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    asyncio.run(server.serve(sockets=[listener]))
    failure: FedcgError | OSError | None = application.state.failure
    if isinstance(failure, FedcgError):
        raise failure
    if failure is not None:
        raise HomeError(
            f"the coordinator can't start: {failure}. Restore a backup: `fedcg coordinator restore FILE --dir NEW`"
        ) from failure
    return code if server.started else 1


class _Server(uvicorn.Server):
    """A server that refuses all open and waiting plans before it ends."""

    state: State

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse all plans, then shut down."""
        self.state.operations.stopping.set()
        with anyio.move_on_after(REFUSED_S):
            async with self.state.creating:
                pass
        await super().shutdown(sockets)


@contextmanager
def _opened(home: Home, config: CoordinatorConfig, *, accepts_loss: bool = False) -> Iterator[tuple[Store, EventLog]]:
    check_whole(home)
    with ExitStack() as opened:
        store = Store.of(home, accepts_loss=accepts_loss)
        opened.callback(store.close)
        end_silences(home)  # completes the work of a killed coordinator; blocks while a federation is being created
        limit = LineLimit()
        if config.track is None:
            yield store, coordinator_log(home.events_file, store.events, limit.allows)
            return
        tracked = TrackedFederations(config.track, home.root, store, artifacts_of(home))
        opened.callback(tracked.close)
        yield store, coordinator_log(home.events_file, store.events, limit.allows, tracked.follow)


def _contexts(home: Home, config: CoordinatorConfig, store: Store, events: EventLog) -> ContextOf:
    """A function that returns the dependencies of a federation's service."""
    identities: dict[str, SigningIdentity] = {}
    silenced: dict[str, frozenset[str]] = {}
    changing = threading.Lock()

    def signing_identity(federation: str) -> SigningIdentity:
        identities[federation] = load_signing_identity(home, store, identities.get(federation), federation)
        return identities[federation]

    def shut_out(federation: str, devices: Collection[str]) -> bool:
        with changing:
            silenced[federation] = frozenset(devices)
            return silence(home, frozenset().union(*silenced.values()))

    def context_of(record: FederationRecord) -> ServiceContext:
        artifacts = artifacts_of(home, waits=True)
        return ServiceContext(
            federation=record,
            spec=FederationSpec.parse(artifacts.get(record.spec)),
            store=store,
            artifacts=artifacts,
            connect=lambda will: _connect(home, config, record.id, will),
            signing_identity=partial(signing_identity, record.id),
            worker=WorkerSettings(
                config.aggregation.threads,
                config.aggregation.device,
                home.secret(),
                home.artifacts,
                home.spill,
                home.public_data(config),
                config.aggregation.public_images,
                config.aggregation.stall_s,
            ),
            events=events.about(federation=record.id),
            publish_access=partial(shut_out, record.id),
            are_lists_pending=partial(are_lists_pending, home),
            limits=config.broker.limits,
            keep_rounds=config.storage.keep_rounds,
            rounds=config.rounds,
            robustness=config.robustness,
        )

    return context_of


def _connect(home: Home, config: CoordinatorConfig, federation: str, will: Will) -> Transport:
    own, limits = authority.credential_of(home.pki, COORDINATOR), config.broker.limits
    mqtt = authority.broker_config(home, COORDINATOR, own, connection_name(federation, home.secret()))
    return MqttTransport(replace(mqtt, max_packet=limits.max_packet, in_flight=limits.in_flight), will)
