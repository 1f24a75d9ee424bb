"""Experts on sixteen languages: equal work for a token, floors, what is read of routers, and a page that says what the
records do."""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_runs import quickly

from experiments import language_experts, language_experts_page
from experiments import language_experts_reading as reading
from experiments.transfer_runs import ended, parsed_of, read
from jaxformer import records
from jaxformer.config import from_mapping, load
from jaxformer.data.markov import Markov
from jaxformer.errors import ConfigError
from jaxformer.models import gpt
from jaxformer.specs import init_params
from jaxformer.types import Batch

RESULT = Path(__file__).parents[2] / "experiments" / "results" / "experts"
SHORT = {
    f"data.mixture.language_{number:02}.{field}": value
    for number in range(16)
    for field, value in {"language_tokens": "1000", "validation_fraction": "0.2"}.items()
}


def test_models_cost_the_same_for_a_token_but_for_the_router():
    dense = language_experts.costs(1)
    for experts in language_experts_page.EXPERTS:
        cost = language_experts.costs(experts)
        assert cost["active"] - cost["router"] == dense["active"]
        assert cost["flops"] - cost["router_flops"] == dense["flops"]
        assert cost["router_flops"] == 6 * cost["router"] < 0.02 * cost["flops"]
        one = (dense["total"] - dense["active"], cost["total"] - cost["active"])
        assert one == (0, (experts - 1) * 2 * 2 * 32 * 128)  # two layers, two matrices


def chains(*seeds, symbols=3):
    return [Markov(symbols, 1, 1.0, seed) for seed in seeds]


def test_the_floor_of_a_model_that_is_not_told_is_the_entropy_of_the_mixture():
    """By all rows there are: four symbols, of which the last three are predicted from those before them."""
    drawn, shares = chains(0, 1), [0.25, 0.75]
    rows = np.array(list(itertools.product(range(3), repeat=4)))
    by = np.array([[c.stationary[r[0]] * c.chances[r[:-1], r[1:]].prod() for r in rows] for c in drawn])
    whole, first = shares @ by, np.array(shares) @ [c.stationary[rows[:, 0]] for c in drawn]
    np.testing.assert_allclose(reading.untold(rows, drawn, shares), -np.log(whole / first), rtol=1e-12)
    own = sum(share * (p @ reading.told(rows, c)) for share, p, c in zip(shares, by, drawn, strict=True))
    assert own == pytest.approx(3 * np.dot(shares, [c.next_token_floor(3) for c in drawn]), rel=1e-12)
    best = whole @ reading.untold(rows, drawn, shares)
    assert own + 1e-3 < best < own - np.dot(shares, np.log(shares))
    np.testing.assert_allclose(reading.posterior(rows, drawn, shares), np.array(shares)[:, None] * by / whole)
    assert reading.untold(rows, [drawn[0]] * 2, shares) == pytest.approx(reading.told(rows, drawn[0]))


def test_a_row_that_begins_with_a_separator_and_one_that_ends_early():
    (chain,) = chains(0)
    rows = np.array([[reading.NOTHING, 1, 2], [1, 2, reading.NOTHING]])
    first, rest = reading.log_chances(rows, chain)
    np.testing.assert_allclose(np.exp(first), [1, chain.stationary[1]])
    np.testing.assert_allclose(np.exp(rest), [chain.stationary[1] * chain.chances[1, 2], chain.chances[1, 2]])
    with pytest.raises(ValueError, match="markov of order 2; accepted: markov of order 1"):
        reading.chain_of(from_mapping({}, {"data.source": "markov", "data.language_order": "2"}).data)


def small(experts=4, **model):
    changes = {"model.vocab_size": "64", "model.feed_forward.count": str(experts)}
    return from_mapping(load("expert_languages"), changes | {f"model.{k}": v for k, v in model.items()}).model


def batch_of(tokens):
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return Batch(tokens, tokens, jnp.ones(tokens.shape), places, jnp.ones(tokens.shape, jnp.int32))


def test_the_choices_are_those_of_a_router_that_is_set_by_hand():
    """Attention adds nothing and the first experts nothing either: each router sees the token alone."""
    cfg = small()
    params = init_params(gpt.specs(cfg), jax.random.key(0))
    for name, leaf in (("attention", "w_out"), ("mlp", "w_down")):
        params["blocks"][name][leaf] = jnp.zeros_like(params["blocks"][name][leaf])
    axes = jnp.eye(32)
    params["embedding"]["tokens"] = axes[jnp.arange(64) % 32]
    of_token = np.arange(64) % 32 // 8  # expert of each token id in layer 0; in layer 1 the others way round
    router = np.stack([axes[:, :4] * 0, axes[:, :4] * 0])
    router[0, np.arange(32), of_token[:32]] = 1.0
    router[1, np.arange(32), 3 - of_token[:32]] = 1.0
    params["blocks"]["mlp"]["w_router"] = jnp.asarray(router)
    tokens = jax.random.randint(jax.random.key(1), (2, 64), 0, 64)
    found = reading.choices(params, batch_of(tokens), cfg)
    assert found.shape == (2, 2, 64, 1)
    np.testing.assert_array_equal(found[0, ..., 0], of_token[tokens])
    np.testing.assert_array_equal(found[1, ..., 0], 3 - of_token[tokens])


def test_the_choices_are_as_many_as_the_model_itself_counts():
    """Which it does for its balance loss: they are the gradient of `load`."""
    cfg = small()
    params = init_params(gpt.specs(cfg), jax.random.key(0))
    batch = batch_of(jax.random.randint(jax.random.key(1), (4, 64), 0, 64))
    loss = from_mapping(load("expert_languages")).loss

    @jax.jit
    @jax.grad
    def counted(load):
        mlp = params["blocks"]["mlp"] | {"load": load}
        whole = params | {"blocks": params["blocks"] | {"mlp": mlp}}
        return gpt.loss(whole, batch, cfg, loss)[0]["expert_balance"][0]

    found = np.asarray(reading.choices(params, batch, cfg)).reshape(2, -1)
    counts = np.stack([np.bincount(layer, minlength=4) for layer in found])
    np.testing.assert_array_equal(counts, counted(params["blocks"]["mlp"]["load"]))
    assert (counts > 0).sum() > 4  # not all to one


def test_what_an_expert_says_of_language_and_symbol():
    alone = np.einsum("EL,V->ELV", np.eye(2), np.ones(4))  # an expert for each language, whatever the symbol
    assert reading.informations(alone) == {"language": 1.0, "symbol": 0.0, "more": 1.0}
    other = np.einsum("EV,L->ELV", np.eye(4), np.ones(2))  # for each symbol, whatever the language
    assert reading.informations(other) == {"language": 0.0, "symbol": 2.0, "more": 0.0}
    both = np.zeros((2, 2, 2))  # the language shows only to who knows the symbol
    both[0, 0, 0] = both[0, 1, 1] = both[1, 0, 1] = both[1, 1, 0] = 1
    assert reading.informations(both) == {"language": 0.0, "symbol": 0.0, "more": 1.0}


def test_tokens_are_counted_in_the_second_half_of_rows_if_they_are_symbols():
    tokens = jnp.array([[5, 6, 5, 6], [5, 5, 0, 6]])  # 0: a separator
    segments = jnp.array([[1, 1, 1, 1], [1, 1, 1, 0]])  # the last is padding
    places = np.array([-1, -1, -1, -1, -1, 0, 1])
    chosen = np.array([[[0, 0, 1, 2], [0, 0, 0, 0]]])
    found = language_experts.tokens_of(chosen, batch_of(tokens)._replace(segments=segments), places, 3)
    assert found.tolist() == [[[0, 0], [1, 0], [0, 1]]]


def test_the_curve_of_a_run_on_a_mixture_is_that_of_all_its_sources_together(tmp_path):
    planned = language_experts.run_of(2, 0, 20)
    path = tmp_path / planned.name / "records.jsonl"
    path.parent.mkdir()
    for step, loss in ((10, 3.0), (20, 2.0)):
        for split, less in (("/language_00", 0.5), ("", 0.0)):
            about = {"kind": "eval", "split": f"validation{split}", "step": step, "tokens": 5 * step}
            records.append(path, about | {"loss": loss - less, "loss_stderr": 0.1})
    ends = {"params": 9, "params_non_embedding": 5, "status": "finished", "wall_seconds": 1.0}
    records.append(
        path, {"kind": "final", "step": 20, "tokens": 100, "loss": 2.0, "loss_stderr": 0.1, "flops": 200.0, **ends}
    )
    found = ended(planned, tmp_path)
    assert found["curve"] == [[100.0, 3.0], [200.0, 2.0]] and found["what"] == "run" and found["experts"] == 2


def test_the_page_is_what_the_records_say_and_no_run_is_below_the_floor():
    found = read(RESULT)
    assert (RESULT / "README.md").read_text(encoding="utf-8") == language_experts_page.page(found)
    assert all((RESULT / f"{name}.svg").exists() for name in ("gap", "experts"))
    floor = language_experts_page.floors(found)
    assert floor["told"] < floor["best"] < floor["told"] + np.log(16) / 64
    assert floor["costs"] == {str(n): language_experts.costs(n) for n in language_experts_page.EXPERTS}
    ends = {(each["experts"], each["seed"]): each for each in found if each["what"] == "run"}
    for each in (each for each in found if each["what"] == "reading"):
        assert each["gap"] > -3 * each["gap_stderr"]
        end = ends[each["experts"], each["seed"]]
        assert each["gap"] == pytest.approx(end["loss"] - floor["held_out"], abs=1e-4)  # of the same rows


@pytest.mark.parametrize(
    "flags, line",
    [
        (["--stage=report"], "has no records.jsonl yet; accepted: --stage=train first"),
        (["--seeds=0"], "--seeds"),
        (["--experts=3"], "--experts"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, capsys, flags, line):
    monkeypatch.setattr("sys.argv", ["language_experts", f"--out={tmp_path}", *flags])
    monkeypatch.setattr(language_experts, "run", lambda options: False)
    with pytest.raises((SystemExit, ConfigError)) as refused:
        language_experts.main()
    assert line in capsys.readouterr().err + str(refused.value)


@pytest.mark.slow
def test_the_study_in_little(tmp_path, monkeypatch):
    flags = [f"--out={tmp_path / 'out'}", f"--workdir={tmp_path / 'w'}", "--seeds=1", "--steps=2"]
    monkeypatch.setattr("sys.argv", ["language_experts", *flags])
    monkeypatch.setattr(language_experts, "TEXT", SHORT | {"data.cache_dir": str(tmp_path / "cache")})
    monkeypatch.setattr(language_experts_page, "EXPERTS", (1, 2))
    monkeypatch.setattr("experiments.transfer_runs.keep_compiled_programs", lambda: None)
    with quickly():
        language_experts.main()
    kept = (tmp_path / "out" / "records.jsonl").read_bytes()
    names = [json.loads(line)["run"] for line in kept.splitlines()]
    runs = ["experts=1,seed=0", "experts=2,seed=0"]
    assert sorted(names) == sorted([*runs, *(f"{name},reading" for name in runs), "floors"])
    assert all((tmp_path / "out" / name).stat().st_size > 1000 for name in ("gap.svg", "experts.svg", "README.md"))
    found = {each["run"]: each for each in read(tmp_path / "out")}
    for name in runs:
        gap = found[name]["loss"] - found["floors"]["held_out"]
        assert found[f"{name},reading"]["gap"] == pytest.approx(gap, abs=1e-4)
    config = parsed_of(language_experts.run_of(2, 0, 2), tmp_path / "w").config
    assert config.model.feed_forward.top_k == 1 and config.model.feed_forward.count == 2
    monkeypatch.setattr(language_experts, "read_run", None)  # what is there is not made again
    language_experts.main()
    assert {each["run"]: each for each in read(tmp_path / "out")} == found
