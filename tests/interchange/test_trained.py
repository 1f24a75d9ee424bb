"""Models trained here, exported and opened by transformers: losses on held-out text, tokens, and the way back."""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional.losses import cross_entropy
from jaxformer.interchange import import_model
from jaxformer.models.families import family_of
from jaxformer.programs import export
from jaxformer.runs import pretrain
from jaxformer.runs.command_line import parse_config, parser
from jaxformer.runs.pretrain import open_run

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # torch's and transformers' own warnings
TEXT = [
    "def f(x):\n    return x + 1\n", "import os\n",
    "class A:\n    def __init__(self, name):\n        self.name = name\n",
]  # fmt: skip
OWN = {  # bert_tiny has rotary positions and norms before its sublayers, which no BERT of transformers has
    "gpt_tiny": [],
    "bert_tiny": [
        "--config.model.block=post_norm", "--config.model.positions=learned", "--config.model.bert.token_types=2",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The run of a name; each is trained once."""
    return functools.cache(lambda name: _trained(name, tmp_path_factory.mktemp(name)))


def _trained(name, folder):
    (folder / "text.txt").write_text(Path(argparse.__file__).read_text())
    words = [
        f"--config=configs/{name}.py", "--config.model.num_layers=2", "--config.model.width=48",
        "--config.model.attention.num_heads=4", "--config.model.context_length=64", "--config.model.dtype=float32",
        "--config.train.steps=8", "--config.train.global_batch_size=8", "--config.train.eval_rows=8",
        "--config.data.source=files", f"--config.data.files={folder / 'text.txt'}", "--config.data.separator=\\n\\n",
        "--config.data.tokenizer_vocab=400", "--config.compilation_cache=false",
        *OWN[name], f"--config.workdir={folder / 'run'}", f"--config.data.cache_dir={folder / 'cache'}",
    ]  # fmt: skip
    pretrain.pretrain(parse_config(parser("", "pretrain"), words))
    return folder / "run"


@pytest.mark.parametrize("name, kind", [("gpt_tiny", "llama"), ("bert_tiny", "bert")])
def test_the_way_there_and_back(name, kind, trained, tmp_path, monkeypatch, capsys):
    import torch
    import transformers
    from safetensors.numpy import load_file

    run = trained(name)
    out = tmp_path / "hf"
    monkeypatch.setattr("sys.argv", ["jaxformer export", str(run), f"--out={out}"])
    export.main()
    assert f"{out}: {kind}, float32, of {run} at step 8" in capsys.readouterr().out
    opened, tokenizer = open_run(run), transformers.AutoTokenizer.from_pretrained(out)
    cfg = opened.config.model

    # The same ids, and losses of a ragged batch, padded on the right.
    ids = [opened.tokenizer.encode(text).tolist() for text in TEXT]
    assert [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXT] == ids
    assert [tokenizer.decode(each) for each in ids] == TEXT
    cls = transformers.AutoModelForCausalLM if kind == "llama" else transformers.AutoModelForMaskedLM
    theirs = cls.from_pretrained(out).eval()
    longest = max(map(len, ids))
    padded = np.array([each + [opened.tokenizer.pad_id] * (longest - len(each)) for each in ids])
    real = np.array([[1] * len(each) + [0] * (longest - len(each)) for each in ids])
    segments = {"segments": jnp.asarray(real)}
    targets = jnp.asarray(np.roll(padded, -1, 1))

    @jax.jit
    def outcome(params):
        logits = family_of(cfg).apply(params, jnp.asarray(padded), cfg, **segments)
        return logits, cross_entropy(logits, targets)[0]

    logits, losses = outcome(opened.params)
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(padded), attention_mask=torch.tensor(real)).logits
    np.testing.assert_allclose(np.asarray(logits)[real == 1], wanted.numpy()[real == 1], rtol=1e-4, atol=2e-5)
    ours = np.asarray(losses)[real == 1]
    labels = torch.tensor(np.asarray(targets)).long().flatten()
    lost = torch.nn.functional.cross_entropy(wanted.flatten(0, 1), labels, reduction="none")
    assert ours.mean() == pytest.approx(lost.numpy().reshape(real.shape)[real == 1].mean(), abs=1e-5)

    # What transformers saves again is what we wrote, and comes back as what we trained.
    theirs.save_pretrained(tmp_path / "again")
    a, b = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "again"))
    assert a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
    back = import_model(tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(opened.params), jax.device_get(back.params))


def test_what_cannot_be_written_is_one_line(trained, tmp_path, monkeypatch):
    from jaxformer.errors import ConfigError

    run = trained("gpt_tiny")
    for words, line in (
        (["--dtype=int8", f"--out={tmp_path / 'x'}"], r"^--dtype: 'int8' is not one of float32, bfloat16, float16$"),
        ([f"--out={run / 'manifest.json'}"], r"manifest.json: is not a directory$"),
    ):
        monkeypatch.setattr("sys.argv", ["jaxformer export", str(run), *words])
        with pytest.raises(ConfigError, match=line):
            export.main()
