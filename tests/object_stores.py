"""Object stores on 127.0.0.1 that speak the real protocols, and a proxy that delays and drops what it carries."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

COMMANDS = {
    "gs": ["-m", "gcp_storage_emulator", "start", "--host=127.0.0.1", "--in-memory", "--default-bucket=bucket"],
    "s3": ["-m", "moto.server", "-H", "127.0.0.1"],
}
PLACES = ("STORAGE_EMULATOR_HOST", "AWS_ENDPOINT_URL")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment(scheme: str, port: int) -> dict[str, str]:
    """What makes clients use the server at `port`."""
    url = f"http://127.0.0.1:{port}"
    if scheme == "gs":
        return {"STORAGE_EMULATOR_HOST": url}
    return {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "AKIATEST", "AWS_SECRET_ACCESS_KEY": "S3CRET",
            "AWS_DEFAULT_REGION": "us-east-1"}  # fmt: skip


@contextlib.contextmanager
def server(scheme: str) -> Iterator[int]:
    """A store with an empty bucket named "bucket"; yields its port."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, *COMMANDS[scheme], f"--port={port}"] if scheme == "gs"
        else [sys.executable, *COMMANDS[scheme], "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None and time.monotonic() < until, f"no {scheme} server"
            time.sleep(0.05)
        if scheme == "s3":
            import fsspec

            store = fsspec.filesystem("s3", skip_instance_cache=True, endpoint_url=f"http://127.0.0.1:{port}", key="a",
                                      secret="b")  # fmt: skip
            store.mkdir("bucket")
        yield port
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def in_this_process(scheme: str, port: int) -> Iterator[None]:
    """This process, too, uses the server at `port`."""
    from jaxformer.storage import object_store

    before = {name: os.environ.get(name) for name in environment(scheme, port)}
    os.environ.update(environment(scheme, port))
    object_store._systems.clear()
    try:
        yield
    finally:
        object_store._systems.clear()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class Proxy:
    """Carries connections to a port; every answer may be delayed, and any connection dropped in the middle.

    Attributes:
      port: of the proxy.
      delay: seconds before each block of an answer.
      drop: probability that a block ends its connection instead.
      down: True: no connection is served.
      requests: the first lines of the requests.
    """

    def __init__(self, target: int, seed: int = 0):
        self.target, self.delay, self.drop, self.down = target, 0.0, 0.0, False
        self.requests: list[str] = []
        self._dice = random.Random(seed)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            if self.down:
                client.close()
                continue
            try:
                there = socket.create_connection(("127.0.0.1", self.target))
            except OSError:  # the store has ended
                client.close()
                continue
            for source, sink, answers in ((client, there, False), (there, client, True)):
                threading.Thread(target=self._carry, args=(source, sink, answers), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while block := source.recv(1 << 16):
                first = block.split(b"\r\n", 1)[0].decode(errors="replace")
                if not answers and first.endswith("HTTP/1.1"):
                    self.requests.append(first)
                if answers:
                    time.sleep(self.delay)
                if self.down or self._dice.random() < self.drop:
                    break
                sink.sendall(block)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def wait_for(told: Callable[[], bool], seconds: float = 60) -> None:
    """Waits until `told()`; AssertionError if that takes too long."""
    until = time.monotonic() + seconds
    while not told():
        assert time.monotonic() < until
        time.sleep(0.01)
