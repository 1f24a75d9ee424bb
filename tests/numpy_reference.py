"""The mathematics once more, in float64 NumPy, written to be read against the papers and not to be fast.

Nothing here imports jaxformer: a mistake there cannot be repeated here by a shared line.
"""

import math

import numpy as np


def softmax(scores):
    """Over the last axis; a row of nothing but -inf gives zeros."""
    top = np.max(scores, axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0, 1.0, total)


def attention_weights(query, key, allowed=None, bias=None, scale=None, soft_cap=None):
    """[B, T, H, K] x [B, S, G, K] -> [B, H, T, S], head by head."""
    batch, queries, heads, width = query.shape
    keys, groups = key.shape[1:3]
    scale = width**-0.5 if scale is None else scale
    shape = (batch, heads, queries, keys)
    scores = np.zeros(shape)
    for head in range(heads):
        group = head // (heads // groups)
        scores[:, head] = np.einsum("btk,bsk->bts", query[:, :, head], key[:, :, group]) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + np.broadcast_to(bias, shape)
    if allowed is not None:
        scores = np.where(np.broadcast_to(allowed, shape), scores, -np.inf)
    return softmax(scores)


def attention(query, key, value, **options):
    """[B, T, H, K']; options as in `attention_weights`."""
    weights = attention_weights(query, key, **options)
    heads, groups = query.shape[2], key.shape[2]
    out = [np.einsum("bts,bsk->btk", weights[:, head], value[:, :, head // (heads // groups)]) for head in range(heads)]
    return np.stack(out, axis=2)


def allowed(queries, keys, *, causal=False, window=None, prefix=None, padding=None, segments=None, dense=None):
    """bool [B, 1, T, S], one pair at a time."""
    rows = max([len(x) for x in (prefix, padding, segments, dense) if x is not None], default=1)
    out = np.ones((rows, 1, queries, keys), bool)
    for b in range(rows):
        for t in range(queries):
            for s in range(keys):
                see = not causal or s <= t
                see &= window is None or abs(t - s) < window
                see &= prefix is None or s <= t or s < prefix[b]
                see &= padding is None or bool(padding[b][s])
                see &= segments is None or segments[b][t] == segments[b][s]
                see &= dense is None or bool(dense[b][0][t][s])
                out[b, 0, t, s] = see
    return out


def sinusoidal(positions, width, base=10_000.0):
    """Vaswani et al. 2017, section 3.5, entry by entry."""
    out = np.zeros((len(positions), width))
    for row, position in enumerate(positions):
        for i in range(width // 2):
            angle = position / base ** (2 * i / width)
            out[row, 2 * i], out[row, 2 * i + 1] = math.sin(angle), math.cos(angle)
    return out


def rotary(x, positions, frequencies, scale=1.0):
    """Su et al. 2021: each pair (x[i], x[i + K/2]) as a complex number, multiplied by exp(i m theta).

    `x`: [B, T, H, K]; `positions`: [B, T].
    """
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    turned = pairs * np.exp(1j * positions[:, :, None, None] * np.asarray(frequencies))
    return scale * np.concatenate([turned.real, turned.imag], axis=-1)


def alibi_slopes(heads):
    """Press et al. 2022, section 3: a geometric series from 2^(-8/n); odd ones of 2n fill up other head counts."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 * (i + 1) / heads) for i in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(below) + alibi_slopes(2 * below)[0::2][: heads - below]


def alibi(queries, keys, heads):
    """[H, T, S]."""
    out = np.zeros((heads, queries, keys))
    for head, slope in enumerate(alibi_slopes(heads)):
        for t in range(queries):
            for s in range(keys):
                out[head, t, s] = -slope * abs(t - s)
    return out


def t5_bucket(relative, bidirectional, buckets=32, max_distance=128):
    """Raffel et al. 2020, section 2.1, for one key-minus-query distance."""
    start = 0
    if bidirectional:
        buckets //= 2
        if relative > 0:
            start = buckets
        distance = abs(relative)
    else:
        distance = max(-relative, 0)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    far = exact + int(math.log(distance / exact) / math.log(max_distance / exact) * (buckets - exact))
    return start + min(far, buckets - 1)


def layer_norm(x, scale, bias=0.0, epsilon=1e-5):
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * scale + bias


def rms_norm(x, scale, epsilon=1e-5):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * scale


def relu(x):
    return np.where(x > 0, x, 0.0)


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


ACTIVATIONS = {
    "relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "swiglu": silu, "geglu": gelu, "geglu_tanh": gelu_tanh,
}  # fmt: skip


def mlp(x, p, activation):
    """`p` holds w_up, w_down and, where they are, b_up, b_down, w_gate."""
    function = ACTIVATIONS[activation]
    hidden = x @ p["w_up"] + p.get("b_up", 0.0)
    hidden = function(x @ p["w_gate"]) * hidden if "w_gate" in p else function(hidden)
    return hidden @ p["w_down"] + p.get("b_down", 0.0)


def block(p, x, cfg, allowed=None, frequencies=None, positions=None, bias=None, rotary_scale=1.0, source=None):
    """One block without dropout. `positions`: [B, T]; `source`: (an encoder's states, which of them each token sees);
    the other arguments as above."""

    def norm(name, x):
        q = p[name]
        if cfg.norm == "rms_norm":
            return rms_norm(x, q["scale"], cfg.norm_epsilon)
        return layer_norm(x, q["scale"], q.get("bias", 0.0), cfg.norm_epsilon)

    def mix(a, x, read, turned, **options):
        query, key, value = (
            np.einsum("btd,dhk->bthk", y, a[f"w_{name}"]) + a.get(f"b_{name}", 0.0)
            for name, y in (("query", x), ("key", read), ("value", read))
        )
        if cfg.attention.qk_norm:
            query, key = (rms_norm(y, a[f"{n}_scale"], cfg.norm_epsilon) for n, y in (("query", query), ("key", key)))
        if turned:
            query, key = (rotary(y, positions, frequencies, rotary_scale) for y in (query, key))
        out = attention(query, key, value, scale=cfg.attention.scale, soft_cap=cfg.attention.soft_cap, **options)
        return np.einsum("bthk,hkd->btd", out, a["w_out"]) + a.get("b_out", 0.0)

    def attend(x):
        return mix(p["attention"], x, x, frequencies is not None, allowed=allowed, bias=bias)

    def look(x):
        return mix(p["cross"], x, source[0], False, allowed=source[1])

    def feed(x):
        return mlp(x, p["mlp"], cfg.feed_forward.activation)

    if cfg.block == "parallel":
        y = norm("attention_norm", x)
        return x + attend(y) + (look(y) if source else 0) + feed(y)
    if cfg.block == "post_norm":
        x = norm("attention_norm", x + attend(x))
        x = norm("cross_norm", x + look(x)) if source else x
        return norm("mlp_norm", x + feed(x))
    x = x + attend(norm("attention_norm", x))
    x = x + look(norm("cross_norm", x)) if source else x
    return x + feed(norm("mlp_norm", x))


def hidden(
    params, tokens, cfg, positions, allowed, frequencies=None, bias=None, rotary_scale=1.0, types=None, source=None
):
    """Last hidden states of a stack, layer by layer. `positions`: [B, T]; `source`: as of `block`."""
    e = params["embedding"]
    x = e["tokens"][tokens]
    if cfg.positions.kind == "learned":
        x = x + e["positions"][positions]
    if cfg.positions.kind == "sinusoidal":
        x = x * math.sqrt(cfg.width) + np.stack([sinusoidal(row, cfg.width) for row in positions])
    if "types" in e:
        x = x + e["types"][np.zeros_like(tokens) if types is None else types]

    def norm(q, x):
        if cfg.norm == "rms_norm":
            return rms_norm(x, q["scale"], cfg.norm_epsilon)
        return layer_norm(x, q["scale"], q.get("bias", 0.0), cfg.norm_epsilon)

    if "embedding_norm" in params:
        x = norm(params["embedding_norm"], x)
    for layer in range(cfg.num_layers):
        p = {group: {name: leaf[layer] for name, leaf in leaves.items()} for group, leaves in params["blocks"].items()}
        x = block(p, x, cfg, allowed, frequencies, positions, bias, rotary_scale, source)
    return norm(params["final_norm"], x) if "final_norm" in params else x


def masked_head(params, x, cfg):
    """BERT's logits from its hidden states."""
    h = params["head"]
    x = gelu(x @ h["w"] + h["b"])
    if cfg.norm == "rms_norm":
        x = rms_norm(x, h["norm"]["scale"], cfg.norm_epsilon)
    else:
        x = layer_norm(x, h["norm"]["scale"], h["norm"].get("bias", 0.0), cfg.norm_epsilon)
    return x @ h.get("table", params["embedding"]["tokens"]).T + h["bias"]


def cross_entropy(logits, targets, label_smoothing=0.0, z_loss=0.0):
    """(loss, -log p(target)) of every position, through the explicit target distribution."""
    flat, out = logits.reshape(-1, logits.shape[-1]), []
    for row, target in zip(flat, np.reshape(targets, -1), strict=True):
        log_z = math.log(np.exp(row - row.max()).sum()) + row.max()
        wanted = np.full(len(row), label_smoothing / len(row))
        wanted[target] += 1 - label_smoothing
        out.append((-(wanted * (row - log_z)).sum() + z_loss * log_z**2, log_z - row[target]))
    loss, nll = np.array(out).T
    return loss.reshape(targets.shape), nll.reshape(targets.shape)
