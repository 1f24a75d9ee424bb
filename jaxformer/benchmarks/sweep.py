"""Eight members of a sweep together, and the same eight as eight processes one after another; whole times.

Nothing is compiled when either begins; the processes find in the compilation cache what the first of them compiled, as
users' do. The text is there already.
"""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxformer.benchmarks.suite import Suite

# million parameters -> width, layers
SIZES = {0.1: (64, 2), 0.5: (128, 2), 2.0: (192, 4)}
RATES = (0.0008, 0.0016, 0.0024, 0.004, 0.0064, 0.0096, 0.016, 0.024)
CONFIG = """
from ml_collections import ConfigDict

def get_config(what="run"):
    config = {{
        "model": {{"context_length": 64, "positions": "rotary", "width": {width}, "num_layers": {layers},
                  "attention": {{"num_heads": {heads}}}}},
        "data": {{"source": "markov", "language_symbols": 32, "language_order": 1, "language_tokens": 2_000_000,
                 "validation_fraction": 0.01, "cache_dir": {cache!r}}},
        "optimizer": {{"schedule": "cosine", "warmup_steps": 20, "learning_rate": 8e-3}},
        "execution": {{"steps_per_dispatch": 20}},
        "train": {{"global_batch_size": 16, "steps": 300, "eval_every_steps": 1000}},
        "checkpoint": {{"save_every_minutes": None}},
    }}
    if what == "study":
        config["ladder"] = {{"widths": ({width},), "head_width": 16, "layer_width": {width} // {layers},
                            "tokens": (300 * 16 * 64,), "learning_rate_extensions": 0,
                            "learning_rates": {factors}}}
    return ConfigDict(config)
"""


def contestants(options) -> Suite:
    """300 steps of 16 x 64 tokens at eight learning rates."""
    width, layers = SIZES[options.size]
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    factors = tuple(rate / 0.008 for rate in RATES)
    text = CONFIG.format(width=width, layers=layers, heads=width // 16, cache=str(folder / "text"), factors=factors)
    (folder / "config.py").write_text(text)
    rounds = iter(range(1000))

    def fresh() -> tuple[Path, dict[str, str]]:
        """A folder of its own, and an environment whose caches are in it."""
        own = folder / str(next(rounds))
        return own, {**os.environ, "XDG_CACHE_HOME": str(own / "cache")}

    def start(name: str, *flags: str, env: dict[str, str]) -> None:
        command = [sys.executable, "-m", "jaxformer", name, *flags]
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def together() -> None:
        own, env = fresh()
        study = [f"--config={folder / 'config.py'}:study", f"--config.workdir={own}", "--stage=run"]
        start("scaling", *study, env=env)

    def one_by_one() -> None:
        own, env = fresh()
        for rate in RATES:
            flags = [f"--config.workdir={own / str(rate)}", f"--config.optimizer.learning_rate={rate}"]
            start("pretrain", f"--config={folder / 'config.py'}:run", *flags, env=env)

    return Suite({"eight processes": one_by_one, "one sweep of eight": together})
