"""Programs as forks of one process that has imported what they begin with: a start without its two seconds of imports.

`python -m tests.forks SOCKET MODULES` is that process. It says "ready", and for each client forks a process that
becomes `python -m MODULE ...` in the client's folder and with its environment, input and outputs. It has no backend of
JAX, so nothing is shared but code. Where the environment says something else that is read while importing, the fork
starts Python anew. It ends when its standard input does.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = ("jaxformer.runs.pretrain", "jaxformer.runs.evaluation", "jaxformer.programs.generate", "jaxformer.modules")
WHILE_IMPORTING = ("JAX", "XLA", "PYTHON", "MALLOC", "GLIBC", "TF_", "LIBTPU")  # how the names of variables begin
QUICK = "JAX_DISABLE_MOST_OPTIMIZATIONS"  # may differ: it can be set later
CLIENT = """#!{python} -IS
import json, os, socket, sys
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
client.connect({path!r})
wanted = {{"words": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}
socket.send_fds(client, [json.dumps(wanted).encode()], [0, 1, 2])
sys.exit(int(client.recv(16) or 1))
"""
ANEW = """
import importlib, runpy, sys
for name in filter(None, sys.argv[1].split(",")):
    importlib.import_module(name)
del sys.argv[:2]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@contextlib.contextmanager
def forks(folder: Path, environment: Mapping[str, str], *modules: str) -> Iterator[Path]:
    """A folder for PATH with the commands `forked MODULE ...` and `jaxformer ...`; `modules` are imported first."""
    path = folder / "socket"
    for name, text in {
        "forked": CLIENT.format(python=sys.executable, path=str(path)),
        "jaxformer": f'#!/bin/sh\nexec {shlex.quote(str(folder / "forked"))} jaxformer "$@"\n',
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    words = [sys.executable, "-m", "tests.forks", str(path), *modules]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, cwd=ROOT, env=dict(environment), **pipes) as server:
        try:
            assert server.stdout.readline() == b"ready\n"
            yield folder
        finally:
            server.stdin.close()


def wanted(path: str) -> dict:
    """Serves clients; returns only in a fork, with what its client wants."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(path)
        server.listen()
        print("ready", flush=True)
        while True:
            readable = select.select([server, 0], [], [], 0.5)[0]
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if 0 in readable:
                os._exit(0)
            if not readable:
                continue
            client = server.accept()[0]
            if os.fork():
                client.close()
                continue
            message, descriptors, _, _ = socket.recv_fds(client, 1 << 20, 3)
            if child := os.fork():
                for each in descriptors:
                    os.close(each)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                client.send(str(code if code >= 0 else 128 - code).encode())
                os._exit(0)
            client.close()
            for number, each in enumerate(descriptors):
                os.dup2(each, number)
                os.close(each)
            return json.loads(message)


def main() -> None:
    """Imports, serves and, in a fork, becomes the program."""
    import jax

    modules = sys.argv[2:]
    for name in (*modules, *IMPORTED):
        importlib.import_module(name)
    assert not jax._src.xla_bridge._backends
    gc.collect()
    gc.freeze()
    asked = wanted(sys.argv[1])
    words, folder, environment = asked.values()
    os.chdir(folder)

    def imported(environment):
        return {name: environment[name] for name in environment if name.startswith(WHILE_IMPORTING) and name != QUICK}

    if imported(environment) != imported(os.environ):
        os.execve(sys.executable, [sys.executable, "-c", ANEW, ",".join(modules), *words], environment)
    jax.config.update(QUICK.lower(), environment.get(QUICK, "0") not in ("", "0"))
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w", errors="backslashreplace", buffering=1)  # noqa: SIM115
    sys.path[0], sys.argv = folder, words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
