"""Our own models written for others and read again: every bit, whole or sharded, and what is refused."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import MeshConfig, from_mapping
from jaxformer.errors import ConfigError
from jaxformer.interchange import tensor_files
from jaxformer.interchange.exporting import export_model
from jaxformer.interchange.importing import import_model
from jaxformer.models.families import family_of
from jaxformer.parallel.mesh import make_mesh
from jaxformer.specs import is_spec

SIZES = {"num_layers": 2, "width": 32, "vocab_size": 64, "context_length": 16}
LLAMA = {
    "positions": "rotary", "norm": "rms_norm", "use_bias": False, "tie_embeddings": False,
    "feed_forward": {"activation": "swiglu", "width": 48},
}  # fmt: skip
MODELS = {
    "gpt2": {"feed_forward": {"activation": "gelu_tanh"}},
    "llama": {**LLAMA, "attention": {"num_heads": 4, "num_kv_heads": 2}},
    "mistral": {**LLAMA, "attention": {"num_heads": 4, "window": 5}},
    "qwen3": {**LLAMA, "attention": {"num_heads": 4, "head_width": 12, "qk_norm": True}, "tie_embeddings": True},
    "bert": {"family": "bert", "block": "post_norm", "norm_epsilon": 1e-12, "bert": {"token_types": 2}},
}


def made_config(name):
    data = {"objective": "masked"} if name == "bert" else {}
    return from_mapping({"model": {**SIZES, **MODELS[name]}, "data": data}).model


def made(name):
    cfg, rng = made_config(name), np.random.default_rng(0)
    specs = family_of(cfg).specs(cfg)
    return cfg, jax.tree.map(lambda spec: rng.normal(0, 0.3, spec.shape).astype(np.float32), specs, is_leaf=is_spec)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.mark.parametrize("name", [n if n == "gpt2" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_the_round_trip_keeps_every_bit(name, tmp_path):
    cfg, params = made(name)
    assert export_model(cfg, params, tmp_path / "a") == name
    found = import_model(tmp_path / "a")
    equal(params, found.params)
    assert (found.tokenizer, found.dtype) == (None, "F32")
    tokens = jnp.arange(16)[None]
    both = jax.jit(lambda params: [family_of(c).apply(params, tokens, c) for c in (cfg, found.config)])
    np.testing.assert_array_equal(*both(params))
    export_model(found.config, found.params, tmp_path / "b")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_sharded_files_and_meshes(name, tmp_path, monkeypatch):
    """Several files; each device reads its part; what is read at once is never more than the largest part."""
    cfg, params = made(name)
    export_model(cfg, params, tmp_path, shard_bytes=20_000)
    index = json.loads((tmp_path / tensor_files.INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    largest = 0
    read = import_model.__globals__["TensorFolder"].__getitem__

    class Watched:
        """A tensor that notes how much is taken out of it at once."""

        def __init__(self, tensor):
            self.tensor = tensor

        def __getitem__(self, index):
            nonlocal largest
            found = self.tensor[index]
            largest = max(largest, found.size)
            return found

        def __getattr__(self, name):
            return getattr(self.tensor, name)

    monkeypatch.setattr(tensor_files.TensorFolder, "__getitem__", lambda self, name: Watched(read(self, name)))
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2), jax.devices()[:8])
    found = import_model(tmp_path, mesh)
    equal(params, found.params)
    table = found.params["embedding"]["tokens"]
    assert len(table.sharding.device_set) == 8 and not table.sharding.is_fully_replicated
    whole = max(
        leaf.size // (2 if "blocks" in str(path) else 1) for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    )
    assert largest <= whole // 4


def test_half_precision(tmp_path):
    cfg, params = made("llama")
    export_model(cfg, params, tmp_path, dtype="bfloat16")
    found = import_model(tmp_path)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    equal(rounded, found.params)
    assert (
        found.dtype == "BF16"
        and import_model(tmp_path, dtype="bfloat16").params["final_norm"]["scale"].dtype == "bfloat16"
    )


# What is done to a folder with a llama, and the line that follows.
DAMAGES = {
    "no such folder": (lambda d: shutil.rmtree(d), r"DIR: is not a directory"),
    "no config": (lambda d: (d / "config.json").unlink(), r"DIR/config.json: No such file or directory"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), r"DIR/config.json: holds list; accepted: a "),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), r"DIR/config.json: is not JSON"),
    "unknown type": (
        lambda d: change(d, model_type="lama"),
        r"config.json: model_type: 'lama'; did you mean llama\?",
    ),
    "no type": (lambda d: change(d, model_type=None), r"config.json: model_type: None; accepted: gpt2, llama, "),
    "a bias that is not here": (lambda d: change(d, mlp_bias=True), r"config.json: mlp_bias: True; accepted: False"),
    "another activation": (lambda d: change(d, hidden_act="relu"), r"config.json: hidden_act: 'relu'; accepted: "),
    "a width that is text": (lambda d: change(d, hidden_size="32"), r"config.json: hidden_size: '32' is not a number"),
    "more layers": (
        lambda d: change(d, num_hidden_layers=3),
        r"DIR: lacks layers.2.input_layernorm.weight, layers.2.mlp.down_proj.weight, layers.2.mlp.gate_proj.weight and "
        r"6 more; accepted: all tensors of LlamaForCausalLM, and no others",
    ),
    "fewer layers": (
        lambda d: change(d, num_hidden_layers=1),
        r"DIR: has besides layers.1.input_layernorm.weight, .* and 6 more; accepted: all tensors of LlamaForCausalLM",
    ),
    "another width": (
        lambda d: change(d, intermediate_size=64),
        r"model.layers.0.mlp.down_proj.weight: shape \(32, 48\); accepted with this config.json: \(32, 64\)",
    ),
    "unknown scaling": (
        lambda d: change(d, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        r"config.json: rope_parameters.rope_type: 'longrope'; accepted: default, linear, yarn",
    ),
    "pickles only": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        r"DIR: has no model.safetensors and no model.safetensors.index.json; pytorch_model.bin may run code when it is "
        r"read, and is not opened; accepted: safetensors files",
    ),
    "cut": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-5]),
        r"DIR/model.safetensors: is damaged, or no safetensors file \(.*\)",
    ),
    "empty": (lambda d: (d / "model.safetensors").write_bytes(b""), r"DIR/model.safetensors: is damaged, or no"),
    "a shard is missing": (
        lambda d: index(d, {"model.norm.weight": "model-00002-of-00002.safetensors"}),
        r"DIR/model-00002-of-00002.safetensors: no such file, though model.safetensors.index.json names it",
    ),
    "a shard elsewhere": (
        lambda d: index(d, {"model.norm.weight": "../model.safetensors"}),
        r"DIR/model.safetensors.index.json: weight_map: '../model.safetensors'; accepted: names of files beside it",
    ),
    "an index of what is not there": (
        lambda d: index(d, {"model.nrm.weight": "model.safetensors"}),
        r"DIR/model.safetensors: has no tensor model.nrm.weight, which model.safetensors.index.json says it has",
    ),
    "an index without a map": (lambda d: index(d, None), r"DIR/model.safetensors.index.json: has no weight_map"),
}  # fmt: skip


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def index(folder, weight_map):
    (folder / tensor_files.INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "model"
    export_model(*made("llama"), folder)
    return folder


@pytest.mark.parametrize("name", DAMAGES)
def test_what_cannot_be_read_is_one_line(name, llama, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    damage, line = DAMAGES[name]
    damage(folder)
    with pytest.raises(ConfigError, match=f"^{line.replace('DIR', re.escape(str(folder)))}") as error:
        import_model(folder)
    assert "\n" not in str(error.value)


def test_a_copy_that_differs(tmp_path):
    """A tied table may be there twice, but not as two tables."""
    from safetensors.numpy import load_file, save_file

    export_model(*made("gpt2"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors["transformer.wte.weight"]
    save_file(tensors | {"lm_head.weight": table.copy()}, tmp_path / "model.safetensors")
    import_model(tmp_path)
    save_file(tensors | {"lm_head.weight": table + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lm_head.weight differs from transformer.wte.weight; accepted: equal"):
        import_model(tmp_path)


def test_who_may_read_a_users_files_may_read_weights(tmp_path):
    (tmp_path / "other").touch()
    tensor_files.save_tensors(tmp_path, "model.safetensors", {"a": np.zeros(3)})
    mode = (tmp_path / "model.safetensors").stat().st_mode
    assert mode == (tmp_path / "other").stat().st_mode


def test_names_of_the_first_berts(tmp_path):
    """Their norms have gamma and beta."""
    from safetensors.numpy import load_file, save_file

    cfg = made_config("bert")
    params = jax.tree.map(lambda spec: np.full(spec.shape, 0.5, np.float32), family_of(cfg).specs(cfg), is_leaf=is_spec)
    export_model(cfg, params, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {next((k.replace(*pair) for pair in old.items() if pair[0] in k), k): a for k, a in tensors.items()}
    assert renamed.keys() != tensors.keys()
    unused = {
        "bert.pooler.dense.weight": np.ones((32, 32)),
        "bert.pooler.dense.bias": np.ones(32),
    }  # nothing trained it
    save_file(renamed | unused, tmp_path / "model.safetensors")
    equal(params, import_model(tmp_path).params)


def test_the_heads_of_deberta(tmp_path):
    """Microsoft's own files and those of transformers name it otherwise, and v3's hold a head that is not read."""
    from safetensors.numpy import load_file, save_file

    positions = {"kind": "disentangled", "span": 4, "max_distance": 16}
    model = {**SIZES, **MODELS["bert"], "bert": {"token_types": 0}, "positions": positions}
    cfg, rng = from_mapping({"model": model, "data": {"objective": "masked"}}).model, np.random.default_rng(0)
    params = jax.tree.map(
        lambda spec: rng.normal(0, 0.3, spec.shape).astype(np.float32), family_of(cfg).specs(cfg), is_leaf=is_spec
    )
    assert export_model(cfg, params, tmp_path) == "deberta-v2"
    tensors = load_file(tmp_path / "model.safetensors")
    old = {"cls.predictions.transform.": "lm_predictions.lm_head.", "cls.predictions.": "lm_predictions.lm_head."}
    renamed = {next((k.replace(*pair) for pair in old.items() if pair[0] in k), k): a for k, a in tensors.items()}
    assert sum("lm_predictions" in name for name in renamed) == 5
    save_file(renamed | {"mask_predictions.dense.weight": np.ones((32, 32))}, tmp_path / "model.safetensors")
    equal(params, import_model(tmp_path).params)
    save_file(tensors | renamed, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has \S+ and \S+, two names of one tensor; accepted: one of them"):
        import_model(tmp_path)


def test_what_others_cannot_be_is_one_line(tmp_path):
    for more, line in (
        (
            {"block": "parallel"},
            r"^config.model.block: 'parallel' -> 'pre_norm': gpt2, the nearest architecture of transf",
        ),
        ({"attention": {"num_heads": 4, "soft_cap": 9.0}}, r"^config.model.attention.soft_cap: 9.0 -> None: gpt2, the"),
        (
            {"attention": "lstm", "positions": "none"},
            r"^config.model: a gpt with lstm attention and none positions like this; accepted: what one of gpt2, ",
        ),
        (
            {**LLAMA, "positions": "alibi"},
            r"^config.model: a gpt with softmax attention and alibi positions like this; accepted",
        ),
        (
            {**LLAMA, "feed_forward": {"kind": "experts", "activation": "swiglu", "width": 48, "shared": 1}},
            r"^config.model.feed_forward.shared: 1 -> 0: \w+, the nearest architecture of transformers",
        ),
    ):
        cfg = from_mapping({"model": {**SIZES, **more}}).model
        with pytest.raises(ConfigError, match=line):
            export_model(cfg, {}, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    export_model(*made("gpt2"), tmp_path / "x")
    with pytest.raises(ConfigError, match=r"x: holds model.safetensors; accepted: a folder without a model$"):
        export_model(*made("gpt2"), tmp_path / "x")
    with pytest.raises(ConfigError, match=r"^dtype: 'int8' is not one of float32, bfloat16, float16$"):
        export_model(*made("gpt2"), tmp_path / "y", dtype="int8")
