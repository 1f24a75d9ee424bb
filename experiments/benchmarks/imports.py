"""What importing costs."""

import subprocess
import sys
from collections.abc import Callable


def contestants(options):
    """A fresh interpreter that imports jax and numpy, and one that imports jaxformer."""

    def fresh(line: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", line], check=True)

    lines = {"import jax, numpy": "import jax, numpy, jax.numpy", "import jaxformer": "import jaxformer"}
    return {name: fresh(line) for name, line in lines.items()}, "", 0
