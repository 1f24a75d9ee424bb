"""Whole pretraining processes, from nothing to weights: `jaxformer pretrain`, and transformers' train step on torch.

Ours makes its text, compiles, trains, evaluates and writes a checkpoint; torch's trains on one batch that it has, and
writes nothing.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxformer.benchmarks.suite import Suite, need_peers, process, torch_device
from jaxformer.benchmarks.train import SHAPES, ModelShape, model_config, steps
from jaxformer.config import to_dict

UPDATES = {"tiny": 3000, "baby": 150}  # of a run; one to three minutes of ours on two cores
OTHERS = 60


def contestants(options) -> Suite:
    """So many updates of one shape, each contestant's process from its start to its end.

    Raises:
      ConfigError: torch or transformers is not installed, or torch sees no GPU where JAX does.
    """
    need_peers("pretrain")
    shape = SHAPES[options.shape]
    updates = UPDATES.get(options.shape, OTHERS)
    about = [options.shape, options.dtype, torch_device(), str(updates)]

    def torch(whose: str) -> Callable[[], None]:
        def run() -> None:
            process("-m", "jaxformer.benchmarks.pretrain", whose, *about)

        return run

    def ours() -> None:
        with tempfile.TemporaryDirectory() as folder:
            fields = our_config(shape, options.dtype, updates, folder)
            lines = "from ml_collections import ConfigDict", "def get_config():", f"    return ConfigDict({fields})", ""
            file = Path(folder, "config.py")
            file.write_text("\n".join(lines))
            print(process("-m", "jaxformer", "pretrain", f"--config={file}"))

    found = {"transformers on torch, eager": torch("eager")}
    if shutil.which("g++"):
        found["transformers on torch, compiled"] = torch("compiled")
    return Suite({**found, "jaxformer": ours}, "tokens", updates * shape.rows * shape.context, whole=True)


def our_config(shape: ModelShape, dtype: str, updates: int, folder: str) -> dict[str, Any]:
    """The same model on generated text, one evaluation at the end, programs compiled anew."""
    data = {"source": "markov", "language_tokens": updates * shape.rows * shape.context, "validation_fraction": 0.02}
    objective = {} if shape.family == "gpt" else {"objective": "masked"}
    train = {"steps": updates, "global_batch_size": shape.rows, "eval_every_steps": updates}
    return {
        "model": to_dict(model_config(shape, dtype)),
        "data": {**data, **objective, "cache_dir": folder},
        "optimizer": {"warmup_steps": updates // 10},
        "train": train,
        "execution": {"steps_per_dispatch": min(shape.steps, 10)},
        "workdir": f"{folder}/run",
        "compilation_cache": False,
    }


def main(whose: str, name: str, dtype: str, device: str, updates: str) -> None:
    """One of torch's contestants, in this process."""
    shape = SHAPES[name]
    run = steps(whose, shape, dtype, device)
    for _ in range(int(updates) // shape.steps):
        run()


if __name__ == "__main__":
    main(*sys.argv[1:])
