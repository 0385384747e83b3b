"""The coordinator's message key and its replacement.

The last link in the database determines the current key. Its private key is in a file named by the link's serial number, written durably
before the link. So even if a process is killed in between, the current key can be loaded.
"""

from pathlib import Path

from coordinator.errors import HomeError, PlanError
from coordinator.paths import Home
from coordinator.rounds.records import TokenState
from coordinator.storage.locks import changing_members
from coordinator.storage.store import Store
from fedcg.files import fsync_path
from fedcg.values import Value
from fedcg.wire.errors import WireError
from fedcg.wire.messages.envelopes import SigningKey, VerifyKey, make_link
from fedcg.wire.messages.schemas import KeyLink


class SigningIdentity(Value):
    """The coordinator's signing key and its history: all links since the first key, oldest first."""

    key: SigningKey
    links: tuple[KeyLink, ...] = ()


def load_signing_identity(
    home: Home, store: Store, known: SigningIdentity | None = None, federation: str | None = None
) -> SigningIdentity:
    """Load the current key. It is the same in all federations, but each federation has separate links.

    Args:
        home: the home with its file.
        store: the database with its links.
        federation: federation of the links; default: the first one.
        known: the identity loaded before; its file isn't read again if the links are the same.

    Raises:
        HomeError: its file is missing, or contains another key.
    """
    first = federation or next((record.id for record in store.federations()), None)
    links = () if first is None else store.key_links(first)
    if known is not None and known.links == links:
        return known
    path = key_file(home, links[-1].serial if links else 0)
    try:
        key = SigningKey.load(path)
    except (OSError, WireError) as error:
        raise HomeError(f"the message key can't be loaded: {error}; restore {path} from a backup") from error
    if links and key.public.hex != links[-1].new:
        raise HomeError(f"{path} is not the key that devices have pinned; restore it from a backup")
    return SigningIdentity(key, links)


def rotate_key(home: Home, store: Store, now: float) -> KeyLink:
    """Replace the message key. Earlier keys are kept, and a running coordinator uses the new one within seconds.

    Open tokens contain the earlier key, so they are revoked, with `now` as the time.

    Raises:
        PlanError: there is no federation yet, so no device has pinned the key.
        HomeError: the current key can't be used.
    """
    with changing_members(home):
        federations = store.federations()
        if not federations:
            raise PlanError(
                f"{home.root} has no federation yet: no device has pinned the key, so there is nothing to replace"
            )
        signing_identity = load_signing_identity(home, store)
        serial = signing_identity.links[-1].serial + 1 if signing_identity.links else 1
        new = _new_key(key_file(home, serial))
        epoch = store.epoch()
        links = {
            record.id: make_link(record.id, serial, epoch, signing_identity.key, new.public) for record in federations
        }
        for token in store.register.tokens():
            if token.state(now) is TokenState.OPEN:
                store.register.revoke_token(token.id, now)
        store.add_key_links(links, now)
    return links[federations[0].id]


def links_for(home: Home, store: Store, federation: str) -> list[KeyLink]:
    """The history of the message key for a new federation, so that devices with an earlier key can follow it.

    Raises:
        HomeError: the file of an earlier key is missing.
    """
    try:
        return [
            make_link(
                federation,
                link.serial,
                link.epoch,
                SigningKey.load(key_file(home, link.serial - 1)),
                VerifyKey.from_hex(link.new),
            )
            for link in load_signing_identity(home, store).links
        ]
    except (OSError, WireError) as error:
        raise HomeError(f"an earlier message key can't be loaded: {error}; restore it from a backup") from error


def key_file(home: Home, serial: int) -> Path:
    """The file of a private key."""
    return home.signing_key.with_stem(f"signing-{serial}") if serial else home.signing_key


def _new_key(path: Path) -> SigningKey:
    """A new key, stored durably. A key left by an interrupted rotation, never announced, is used."""
    try:
        if path.exists():
            return SigningKey.load(path)
    except WireError:
        path.unlink()  # killed while it was written
    key = SigningKey.generate()
    key.save(path)
    fsync_path(path.parent)
    return key
