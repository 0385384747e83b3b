"""A private PostgreSQL: a throw-away cluster on loopback, and a database in it for each test."""

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL, create_engine

from tests.support.waiting import free_port

PASSWORD = "s3cret-of-the-test-database"
WHY_MISSING = "needs PostgreSQL's initdb and pg_ctl: apt-get install postgresql"


def programs() -> Path | None:
    """Return the folder of PostgreSQL's programs, which Debian keeps off PATH."""
    found = shutil.which("pg_ctl")
    if found is not None:
        return Path(found).resolve().parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


@dataclass(frozen=True)
class Cluster:
    """A server with the role `postgres`, whose password is `PASSWORD`; on loopback, or at another address of this machine."""

    folder: Path
    bin: Path
    port: int
    address: str = "127.0.0.1"

    def url(self, database: str) -> URL:
        return URL.create("postgresql+psycopg", "postgres", PASSWORD, self.address, self.port, database)

    def execute(self, statement: str) -> None:
        engine = create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.exec_driver_sql(statement)
        engine.dispose()

    def make_database(self) -> URL:
        """Create a new, empty database."""
        name = f"test_{secrets.token_hex(6)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def end_sessions(self, database: URL) -> None:
        """Break every connection to a database, like a restart of the server."""
        self.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database.database}'")  # noqa: S608

    def start(self) -> None:
        options = (
            f"-c listen_addresses={self.address} -p {self.port} -c unix_socket_directories={self.folder} -c fsync=off"
        )
        self._run(
            "pg_ctl", "-D", str(self.folder / "data"), "-l", str(self.folder / "log"), "-w", "-o", options, "start"
        )

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "-w", "stop")

    def initialise(self) -> None:
        password = self.folder / "password"
        password.write_text(PASSWORD)
        if os.geteuid() == 0:
            for path in (self.folder, password):
                shutil.chown(path, "postgres")
        self._run(
            *("initdb", "-D", str(self.folder / "data"), "-U", "postgres", "-A", "scram-sha-256", "--no-sync"),
            *("--pwfile", str(password), "-E", "UTF8", "--locale=C.UTF-8"),
        )
        with (self.folder / "data" / "pg_hba.conf").open("a") as access:
            access.write(f"host all all {self.address}/24 scram-sha-256\n")

    def _run(self, program: str, *words: str) -> None:
        as_user = ("runuser", "-u", "postgres", "--") if os.geteuid() == 0 else ()  # initdb and pg_ctl refuse root
        done = subprocess.run(
            [*as_user, str(self.bin / program), *words],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{program}: {done.stderr}{done.stdout}"


@contextmanager
def running_cluster(address: str = Cluster.address) -> Iterator[Cluster]:
    """Run a cluster during the block; `programs` must have found the folder."""
    found = programs()
    assert found is not None, WHY_MISSING
    folder = Path(tempfile.mkdtemp(prefix="fedcg-postgres-"))
    cluster = Cluster(folder, found, free_port(), address)
    try:
        cluster.initialise()
        cluster.start()
        yield cluster
        cluster.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
