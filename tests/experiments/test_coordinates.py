"""The coordinate check: slopes of planted powers, what is measured, and what the committed records say."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import coordinates, coordinates_page
from jaxformer.models import gpt
from jaxformer.specs import is_spec

RESULT = Path(__file__).parents[2] / "experiments" / "results" / "coordinates"


def planted(power):
    for seed in range(2):
        for width, layers in ((64, 2), (128, 2), (256, 2), (64, 4)):
            change = (1 + seed) * (width / 64) ** power["width"] * (layers / 2) ** power["layers"]
            changes = {name: [1.0, change] for name in coordinates.OUTPUTS}
            point = {"optimizer": "adamw", "width": width, "layers": layers, "seed": seed, "changes": changes}
            yield from ({**point, "kind": kind} for kind in coordinates.KINDS)


def test_slopes_are_planted_powers():
    found = list(planted({"width": 0.75, "layers": -0.5}))
    curve = coordinates_page.curve(found, "adamw", "mup", "logits", "width")
    np.testing.assert_allclose(curve, [(64, 2**0.5), (128, 2**1.25), (256, 2**2)])
    line = "| adamw | muP | +0.75 | +0.75 | +0.75 | 256 | -0.50 | -0.50 | 4 |"
    assert line in coordinates_page.page(found).splitlines()


@pytest.mark.slow
def test_outputs_are_those_of_the_model():
    cfg = replace(coordinates.model(coordinates.Point("adamw", "mup", 64, 4, 0)), vocab_size=16)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda spec: rng.normal(size=spec.shape).astype(np.float32), gpt.specs(cfg), is_leaf=is_spec)
    tokens = jnp.arange(8)[None]

    def both(params):
        return coordinates.outputs(params, tokens, cfg), gpt.apply(params, tokens, cfg)

    found, logits = jax.jit(both)(params)
    np.testing.assert_allclose(found["logits"], logits, rtol=1e-5, atol=1e-5)
    assert np.abs(found["first"] - found["last"]).min() > 0


def test_the_page_is_what_the_records_say_and_shows_what_is_claimed():
    found = coordinates.load(RESULT)
    assert coordinates_page.page(found) == (RESULT / "README.md").read_text(encoding="utf-8")
    assert len({json.dumps([each[name] for name in coordinates.Point._fields]) for each in found}) == len(found)

    def slope(kind, sweep, name="logits"):
        return coordinates_page.slope(coordinates_page.curve(found, "adamw", kind, name, sweep))

    assert abs(slope("mup", "width")) < 0.1 and abs(slope("mup", "layers")) < 0.1 and slope("standard", "width") > 0.7
    assert abs(slope("mup", "layers", "last")) < 0.1 and slope("standard", "layers", "last") > 1
