"""kill -9 at random moments of a run, on a machine of any speed: how long a start takes is measured, not assumed."""

import random
import subprocess
import time
from collections.abc import Callable


def kill_often(
    start: Callable[[], subprocess.Popen], reached: Callable[[], int], dice: random.Random, kills: int, ahead: int
) -> None:
    """Starts and kills a run `kills` times, a third of them anywhere while it starts, the others while it trains.

    `reached()` is the furthest step on record; a run killed while it trains was given up to `ahead` more steps and a
    tenth of a second. Raises AssertionError if the run was over before it was killed.
    """
    begin = None  # seconds from a start to its first new step
    for kill in range(kills):
        process, before, since = start(), reached(), time.monotonic()
        if begin is not None and kill % 3 == 0:
            time.sleep(dice.uniform(0.05, begin))
        else:
            target = before + dice.randint(1, ahead)
            while process.poll() is None and reached() <= before:
                time.sleep(0.005)
            begin = time.monotonic() - since
            while process.poll() is None and reached() < target:
                time.sleep(0.005)
            time.sleep(dice.uniform(0.0, 0.1))
        alive = process.poll() is None
        process.kill()
        said = process.communicate()
        assert alive, f"over before kill {kill}: {said}"
