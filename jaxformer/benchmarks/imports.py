"""What importing costs."""

import subprocess
import sys
from collections.abc import Callable

from jaxformer.benchmarks.suite import Suite


def contestants(options) -> Suite:
    """A fresh interpreter that imports jax and numpy, and one that imports jaxformer."""

    def fresh(line: str) -> Callable[[], None]:
        def run() -> None:
            subprocess.run([sys.executable, "-c", line], check=True)

        return run

    lines = {"import jax, numpy": "import jax, numpy, jax.numpy", "import jaxformer": "import jaxformer"}
    return Suite({name: fresh(line) for name, line in lines.items()})
