"""The suite `long`: every mechanism of its table has a time and temporaries, and a slope is what the points say."""

from types import SimpleNamespace

import pytest

from jaxformer.benchmarks import long
from jaxformer.errors import ConfigError


def test_slopes_are_those_of_powers():
    measured = {"b, 1024 tokens": ("s", [1.0])}
    for power, tokens in enumerate(long.lengths(8192)):
        measured[f"a, {tokens} tokens"] = ("s", [0.0, 4.0**power, 99.0])
        measured[f"a, {tokens} tokens, temporaries"] = ("MiB", [3.0 * 2**power])
    assert list(long.slopes(measured)) == ["a: time grows as tokens^2.00, temporaries grows as tokens^1.00"]


def test_a_mechanism_that_is_not_there():
    with pytest.raises(ConfigError, match=r"^--mechanisms: 'dens' is not one of dense, "):
        long.contestants(SimpleNamespace(mechanisms="dens", tokens=64, shortest=1024, dtype="float32"))


@pytest.mark.slow
def test_every_mechanism_runs():
    found = long.contestants(SimpleNamespace(mechanisms=None, tokens=256, shortest=1024, dtype="float32")).contestants
    assert len(found) == 2 * len(long.MECHANISMS)
    for name, run in found.items():
        measured = run()
        assert (measured is None) == ("temporaries" not in name) and (measured is None or measured > 0)
