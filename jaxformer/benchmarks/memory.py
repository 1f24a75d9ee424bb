"""Peak memory of a process that does some train steps and nothing else: ours and transformers' on torch."""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable

from jaxformer.benchmarks.suite import Suite, need_peers
from jaxformer.benchmarks.train import SHAPES, steps

STEPS = 3  # measurements of the suite `train`


def contestants(options) -> Suite:
    """MiB of a whole process, interpreter and libraries included: the most that was resident at once."""
    need_peers("memory")

    def process(who: str) -> Callable[[], float]:
        command = [sys.executable, "-m", "jaxformer.benchmarks.memory", who, options.shape, options.dtype]
        return lambda: json.loads(subprocess.run(command, check=True, capture_output=True).stdout)

    found = {"transformers on torch, eager": process("eager")}
    if shutil.which("g++"):
        found["transformers on torch, compiled"] = process("compiled")
    return Suite({**found, "jaxformer": process("ours")})


def main(who: str, shape: str, dtype: str) -> None:
    """One contestant, in this process."""
    run = steps(who, SHAPES[shape], dtype, "cpu")
    for _ in range(STEPS):
        run()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10))


if __name__ == "__main__":
    main(*sys.argv[1:])
