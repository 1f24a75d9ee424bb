"""LSTM and GRU, one way and both ways, against torch's with its random weights: outputs and all gradients, float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional.recurrent import gru, lstm

pytestmark = pytest.mark.peers
B, T, D, H = 3, 13, 5, 7
NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_equals_torch(kind, both_ways):
    import torch

    torch.manual_seed(0)
    theirs = getattr(torch.nn, kind)(D, H, batch_first=True, bidirectional=both_ways).double()
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    wanted = theirs(x)[0]
    weight = torch.randn_like(wanted)
    (wanted * weight).sum().backward()
    endings = ["", "_reverse"][: 1 + both_ways]

    def ours(x, params):
        outs = []
        for ending, of_one in zip(endings, params, strict=True):
            w, u, b, d = of_one
            biases = (b + d,) if kind == "LSTM" else (b, d)
            outs.append((lstm if kind == "LSTM" else gru)(x, w.T, u.T, *biases, reverse=bool(ending))[0])
        return jnp.concatenate(outs, -1)

    with jax.enable_x64(True):
        parameters = [[getattr(theirs, f"{name}_l0{ending}") for name in NAMES] for ending in endings]
        params = [[jnp.asarray(p.detach().numpy()) for p in of_one] for of_one in parameters]
        given = jnp.asarray(x.detach().numpy())
        out, backward = jax.vjp(jax.jit(ours), given, params)
        np.testing.assert_allclose(out, wanted.detach().numpy(), atol=1e-14)
        found = backward(jnp.asarray(weight.numpy()))
        np.testing.assert_allclose(found[0], x.grad.numpy(), atol=1e-13)
        for of_one, of_theirs in zip(found[1], parameters, strict=True):
            for grad, parameter in zip(of_one, of_theirs, strict=True):
                np.testing.assert_allclose(grad, parameter.grad.numpy(), atol=1e-13)
