"""A private S3 server: moto_server on loopback, in a process that tests kill and restart. It keeps objects in memory."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from tests.support.waiting import free_port, wait_until

BUCKET = "fedcg-test"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
SERVE = "import sys; from moto.server import main; main(sys.argv[1:])"


@dataclass
class Moto:
    """The server, with one bucket."""

    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/of/one"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        words = [sys.executable, "-W", "ignore", "-c", SERVE, "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._has_bucket, "the bucket is made")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def objects(self) -> set[str]:
        """Return the names of all objects under the prefix."""
        listed = self._client().list_objects_v2(Bucket=BUCKET, Prefix="of/one/")
        return {item["Key"].removeprefix("of/one/") for item in listed.get("Contents", [])}

    def overwrite(self, key: str, data: bytes) -> None:
        self._client().put_object(Bucket=BUCKET, Key=f"of/one/{key}", Body=data)

    def _has_bucket(self) -> bool:
        try:
            self._client().create_bucket(Bucket=BUCKET)
        except BotoCoreError:
            return False
        return True

    def _client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=Config(retries={"max_attempts": 1}, connect_timeout=2, proxies={}),
        )


@contextmanager
def running_moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[Moto]:
    """Run a server, and set the environment for its use by this process and its children."""
    moto = Moto()
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": moto.endpoint, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    moto.start()
    try:
        yield moto
    finally:
        moto.kill()
