"""Adapters for peft and from it: the same logits there and here, unmerged and merged, and every number back."""

import importlib
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foreign_folders import folder_of

from jaxformer.config import TuneConfig, from_mapping
from jaxformer.errors import ConfigError
from jaxformer.interchange import export_model, import_model
from jaxformer.interchange.adapter_files import export_adapter, import_adapter
from jaxformer.models.families import family_of
from jaxformer.models.lora import lora_specs, merge_lora, with_adapters
from jaxformer.runs.imported_run import import_run
from jaxformer.runs.pretrain import open_run
from jaxformer.specs import is_spec

SIZES = {"num_layers": 2, "width": 24, "context_length": 8, "vocab_size": 32, "attention": {"num_heads": 4}}
MODELS = {
    "gpt2": {**SIZES, "feed_forward": {"activation": "gelu_tanh"}},
    "llama": {
        **SIZES, "attention": {"num_heads": 4, "num_kv_heads": 2}, "positions": "rotary", "norm": "rms_norm",
        "use_bias": False, "feed_forward": {"activation": "swiglu", "width": 40}, "tie_embeddings": False,
    },
    "gpt_neox": {
        **SIZES, "positions": "rotary", "block": "parallel_norms", "tie_embeddings": False,
        "feed_forward": {"activation": "gelu"},
    },
    "bert": {**SIZES, "family": "bert", "block": "post_norm", "bert": {"token_types": 2}},
}  # fmt: skip
TUNES = {
    "gpt2": TuneConfig(lora_rank=3, lora_alpha=5.0),
    "llama": TuneConfig(lora_rank=4, lora_scaling="rslora"),
    "gpt_neox": TuneConfig(lora_rank=2, lora_targets=("query", "value", "up"), lora_scaling="rslora"),
    "bert": TuneConfig(lora_rank=2, lora_targets=("out", "down", "key")),
}
KINDS = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "gpt_neox": "GPTNeoXForCausalLM",
         "bert": "BertForMaskedLM"}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 8))


def model_of(name):
    """A model with adapters that are not zero."""
    family = MODELS[name].get("family", "gpt")
    data = {"objective": "masked"} if family == "bert" else {}
    cfg = from_mapping({"model": MODELS[name], "data": data}).model
    specs = lora_specs(family_of(cfg).specs(cfg), cfg, TUNES[name])
    rng = np.random.default_rng(1)
    return cfg, jax.tree.map(lambda spec: rng.normal(0, 0.3, spec.shape).astype(np.float32), specs, is_leaf=is_spec)


@pytest.mark.parametrize("name", MODELS)
def test_every_number_comes_back(name, tmp_path):
    cfg, params = model_of(name)
    assert export_adapter(cfg, with_adapters(params, TUNES[name]), tmp_path, TUNES[name]) == name
    tune, adapters = import_adapter(tmp_path, cfg)
    assert (tune.lora_rank, tune.lora_scaling) == (TUNES[name].lora_rank, TUNES[name].lora_scaling)
    assert tune.lora_scale == pytest.approx(TUNES[name].lora_scale)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), adapters, params["adapters"])


def theirs(name, folder):
    import transformers

    return getattr(transformers, KINDS[name]).from_pretrained(folder).eval()


def logits_of(model):
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor(TOKENS)).logits.numpy()


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_peft_has_the_same_logits(name, tmp_path):
    peft = pytest.importorskip("peft")
    cfg, params = model_of(name)
    described = with_adapters(params, TUNES[name])
    run = jax.jit(lambda params: family_of(cfg).apply(params, jnp.asarray(TOKENS), cfg))
    ours = np.asarray(run(described))
    plain = {key: group for key, group in params.items() if key != "adapters"}
    export_model(cfg, plain, tmp_path / "base", model_type=name)
    export_adapter(cfg, described, tmp_path / "adapter", TUNES[name])
    opened = peft.PeftModel.from_pretrained(theirs(name, tmp_path / "base"), tmp_path / "adapter").eval()
    np.testing.assert_allclose(logits_of(opened), ours, rtol=1e-4, atol=2e-5)
    assert np.abs(ours - np.asarray(run(plain))).max() > 0.01

    # What peft merges is what we merge.
    export_model(cfg, merge_lora(described), tmp_path / "merged", model_type=name)
    merged, wanted = theirs(name, tmp_path / "merged").state_dict(), opened.merge_and_unload().state_dict()
    for key, value in merged.items():
        np.testing.assert_allclose(value.numpy(), wanted[key].numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "targets"), [("gpt2", ["c_attn", "c_fc"]), ("llama", ["q_proj", "down_proj"])])
def test_what_peft_made(name, targets, tmp_path):
    import torch

    peft = pytest.importorskip("peft")
    cfg, params = model_of(name)
    plain = {key: group for key, group in params.items() if key != "adapters"}
    export_model(cfg, plain, tmp_path / "base", model_type=name)
    settings = peft.LoraConfig(
        r=4, lora_alpha=7, target_modules=targets, rank_pattern={targets[1]: 2}, init_lora_weights=False
    )
    torch.manual_seed(0)
    made = peft.get_peft_model(theirs(name, tmp_path / "base"), settings).eval()
    made.save_pretrained(tmp_path / "adapter")
    tune, adapters = import_adapter(tmp_path / "adapter", cfg, name)
    described = with_adapters({**plain, "adapters": adapters}, tune)
    ours = jax.jit(lambda params: family_of(cfg).apply(params, jnp.asarray(TOKENS), cfg))(described)
    np.testing.assert_allclose(logits_of(made), ours, rtol=1e-4, atol=2e-5)
    assert tune.lora_rank == 4


BAD = {
    "use_dora": (True, r"adapter_config.json: use_dora: True; accepted: False$"),
    "init_lora_weights": (
        "pissa",
        r"init_lora_weights: 'pissa'; accepted: True, False, 'gaussian', 'orthogonal', 'eva'$",
    ),
    "alora_invocation_tokens": ([7], r"adapter_config.json: alora_invocation_tokens: \[7\]; accepted: None$"),
    "peft_type": ("IA3", r"adapter_config.json: peft_type: 'IA3'; accepted: 'LORA'$"),
    "r": (5, r"blocks.0|h.0.attn.c_proj: shapes \(3, 24\) and \(24, 3\); accepted: \(5, 24\) and \(24, 5\)$"),
    "rank_pattern": ({"c_attn": 0}, r"rank_pattern: {'c_attn': 0}; accepted: {regular expression: finite number above"),
    "alpha_pattern": ({"c_attn": float("nan")}, r"alpha_pattern: {'c_attn': nan}; accepted: {regular expression: fin"),
    "use_rslora": ("no", r"adapter_config.json: use_rslora: 'no'; accepted: False, True$"),
}


def test_what_is_no_adapter_of_the_model(tmp_path):
    cfg, params = model_of("gpt2")
    described = with_adapters(params, TUNES["gpt2"])
    export_adapter(cfg, described, tmp_path, TUNES["gpt2"])
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    for name, (value, line) in BAD.items():
        (tmp_path / "adapter_config.json").write_text(json.dumps(about | {name: value}))
        with pytest.raises(ConfigError, match=line):
            import_adapter(tmp_path, cfg)
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    other = replace(cfg, num_layers=3)
    with pytest.raises(ConfigError, match=r"lacks transformer.h.2.attn.c_attn.lora_A.weight; accepted: lora_A and"):
        import_adapter(tmp_path, other)
    with pytest.raises(ConfigError, match=r"has besides transformer.h.1.attn.c_attn.lora_A.weight; accepted"):
        import_adapter(tmp_path, replace(cfg, num_layers=1))
    with pytest.raises(ConfigError, match=r"holds adapter_config.json; accepted: a folder without a model$"):
        export_adapter(cfg, described, tmp_path, TUNES["gpt2"])
    with pytest.raises(ConfigError, match=r"^config.tune.lora_rank: 0; the model has no adapters; accepted: a run"):
        export_adapter(cfg, merge_lora(described), tmp_path / "new", TUNES["gpt2"])


@pytest.mark.slow
def test_adapters_become_a_run_and_leave_it(tmp_path, monkeypatch, capsys):
    """import --base, export --adapter and export: the same adapters, and the weights with them merged."""
    import_run(folder_of(tmp_path / "theirs"), str(tmp_path / "run"), log=lambda line: None)
    base, tune = open_run(tmp_path / "run"), TuneConfig(lora_rank=2, lora_targets=("gate", "query"))
    cfg = base.config.model
    specs, rng = lora_specs(family_of(cfg).specs(cfg), cfg, tune)["adapters"], np.random.default_rng(0)
    drawn = jax.tree.map(lambda spec: rng.normal(0, 0.3, spec.shape).astype(np.float32), specs, is_leaf=is_spec)
    wanted = merge_lora(with_adapters({**base.params, "adapters": drawn}, tune))
    export_adapter(cfg, with_adapters({**base.params, "adapters": drawn}, tune), tmp_path / "adapter", tune)

    def run(module, *words):
        monkeypatch.setattr("sys.argv", ["jaxformer", *map(str, words)])
        importlib.import_module(f"jaxformer.programs.{module}").main()

    run("import", tmp_path / "adapter", f"--base={tmp_path / 'run'}", f"--workdir={tmp_path / 'tuned'}")
    assert "adapters of rank 2 (gate, query)" in capsys.readouterr().out
    opened = open_run(tmp_path / "tuned")
    assert opened.config.init_from == str(tmp_path / "run") and opened.config.tune.lora_rank == 2
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(merge_lora(opened.params)), jax.device_get(wanted))
    run("export", tmp_path / "tuned", f"--out={tmp_path / 'again'}", "--adapter")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes(), name
    run("export", tmp_path / "tuned", f"--out={tmp_path / 'merged'}")
    merged = import_model(tmp_path / "merged").params
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(merged), jax.device_get(wanted))
