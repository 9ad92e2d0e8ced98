"""An object store on loopback that speaks S3, for tests: SeaweedFS, from its wheel."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store as Objects

from tests.tiers.valkey_rig import free_ports, until

ACCESS_KEY, SECRET_KEY = "kvd-tests", "a-secret-that-nobody-may-see"
BUCKET = "blocks"


def server_binary() -> str | None:
    """`weed`, beside the interpreter or in the path. None: it is not here."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


class S3Server:
    """One server with one bucket. Its files are in `place`."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._ports = free_ports(8)
        self.port = self._ports[0]
        for name, key in (("access", ACCESS_KEY), ("secret", SECRET_KEY)):
            (place / name).write_text(key)
        allowed = {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        (place / "s3.json").write_text(json.dumps({"identities": [allowed]}))
        self.start()
        try:
            self.wait()
        except BaseException:
            self.kill()
            raise

    @property
    def options(self) -> dict[str, str | bool]:
        """Of a tier in the bucket."""
        return {
            "bucket": BUCKET,
            "endpoint": f"http://127.0.0.1:{self.port}",
            "allow_http": True,
            "access_key_file": str(self.place / "access"),
            "secret_key_file": str(self.place / "secret"),
        }

    def start(self) -> None:
        binary = server_binary()
        assert binary is not None, "no server is here"
        s3, master, master_rpc, volume, volume_rpc, filer, filer_rpc, s3_rpc = self._ports
        data = self.place / "data"
        data.mkdir(exist_ok=True)
        command = [binary, "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += ["-filer", "-s3", f"-s3.config={self.place / 's3.json'}", f"-s3.port={s3}"]
        command += [f"-s3.port.grpc={s3_rpc}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += [f"-master.port={master}", f"-master.port.grpc={master_rpc}"]
        command += [f"-volume.port={volume}", f"-volume.port.grpc={volume_rpc}"]
        command += [f"-filer.port={filer}", f"-filer.port.grpc={filer_rpc}"]
        command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=64"]
        with (self.place / "log").open("a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait(self) -> None:
        """Until it serves."""
        until(self._serves)

    def objects(self) -> Objects:
        """The bucket itself, without a tier."""
        return Objects(
            BUCKET,
            config={
                "endpoint": f"http://127.0.0.1:{self.port}",
                "region": "us-east-1",
                "access_key_id": ACCESS_KEY,
                "secret_access_key": SECRET_KEY,
            },
            client_options={"allow_http": True, "timeout": "5s"},
            retry_config={"max_retries": 0},
        )

    def empty(self) -> None:
        objects = self.objects()
        for some in obstore.list(objects):
            obstore.delete(objects, [each["path"] for each in some])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """At once: to be asked to end it would take 25 s."""
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def _serves(self) -> bool:
        """Whether it takes an object; the first one makes the bucket."""
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
            obstore.put(self.objects(), "first", b"1", use_multipart=False)
        except (OSError, BaseError):
            return False
        return True
