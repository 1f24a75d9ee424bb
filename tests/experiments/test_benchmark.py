"""What the benchmark prints follows from what it measured."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxformer.benchmarks import attention, decode_lengths, memory, mixture, pretrain, seq2seq, suite, train
from jaxformer.benchmarks.suite import RULER, Suite, in_process, process
from jaxformer.benchmarks.train import SHAPES, model_config
from jaxformer.config import from_mapping
from jaxformer.errors import ConfigError, ProgramError
from jaxformer.models.flops import count_parameters
from jaxformer.programs import benchmark
from jaxformer.runtime.hardware import chip_of

ROOT = Path(__file__).parents[2]


def test_contestants_alternate_and_the_first_round_only_warms_up():
    seen = []
    found = benchmark.alternate({"a": lambda: seen.append("a"), "b": lambda: seen.append("b") or 7.0}, rounds=2)
    assert seen == ["a", "b"] * 3
    assert found["a"][0] == "s" and len(found["a"][1]) == 2
    assert found["b"] == ("MiB", [7.0, 7.0])


def test_whole_processes_have_nothing_to_warm_up():
    seen = []
    found = benchmark.alternate({"a": lambda: seen.append("a")}, rounds=2, warm_up=0)
    assert seen == ["a"] * 2 and len(found["a"][1]) == 2


@pytest.mark.parametrize("name", SHAPES)
def test_what_pretrain_is_given_is_the_model_of_the_bare_step(name):
    config = from_mapping(pretrain.our_config(SHAPES[name], "bfloat16", 20, "/nowhere"))
    assert config.model == model_config(SHAPES[name], "bfloat16")
    assert (
        config.train.steps * config.train.global_batch_size * config.model.context_length == config.data.language_tokens
    )


def test_a_whole_process_that_fails_is_a_line_with_what_it_said():
    assert process("-c", "print('done')") == "done\n"
    with pytest.raises(ProgramError, match="ended with exit code 3: no such shape"):
        process("-c", "import sys; sys.stderr.write('no such shape'); sys.exit(3)")


@pytest.mark.slow
def test_a_mixture_runs_beside_the_dense_layer_of_its_work():
    found = mixture.contestants(SimpleNamespace(shape="tiny", tokens=64, dtype="float32"))
    assert list(found.contestants) == ["dense layer", "8 experts, 2 for a token"]
    assert [run() for run in found.contestants.values()] == [None, None] and found.work == 64


def test_lines_say_rates_the_share_of_a_product_and_the_ratio_to_the_first():
    suite = Suite({}, "tokens", 100, {"torch": 2e9, "ours": 2e9, RULER: 1e9})
    measured = {"torch": ("s", [0.4, 0.2, 0.3]), "ours": ("s", [0.1]), RULER: ("s", [0.02])}
    assert list(benchmark.lines(suite, measured)) == [
        "torch: median 300 ms, 200 to 400, 333.3 tokens/s, "
        "6.667 GFLOP/s (0.13 of a large product's), 1.000 of the first",
        "ours: median 100 ms, 100 to 100, 1,000 tokens/s, 20 GFLOP/s (0.40 of a large product's), 0.333 of the first",
        f"{RULER}: median 20 ms, 20 to 20, 50 GFLOP/s",
    ]
    assert list(benchmark.lines(Suite({}), {"a": ("MiB", [80.0]), "b": ("MiB", [60.0])})) == [
        "a: median 80 MiB, 80 to 80, 1.000 of the first",
        "b: median 60 MiB, 60 to 60, 0.750 of the first",
    ]


def test_lines_say_the_share_of_the_peak_where_it_is_known():
    suite = Suite({}, "tokens", 100, {"ours": 4.945e12}, peak=chip_of("NVIDIA H200").flops)
    (line,) = benchmark.lines(suite, {"ours": ("s", [0.01])})
    assert "4.945e+05 GFLOP/s (0.500 of the chip's peak)" in line


@pytest.mark.slow
def test_a_contestant_in_a_process_of_its_own(tmp_path, monkeypatch):
    """Ready before the first turn, one run for each turn, and a line if it dies."""
    (tmp_path / "contestant.py").write_text(
        "import sys, pathlib\nfrom jaxformer.benchmarks.suite import take_turns\n"
        "left = [1, 2]\n"
        "def run(): print('noise'); pathlib.Path(sys.argv[1], str(left.pop())).touch()\n"
        "take_turns(run)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    run = in_process("contestant", str(tmp_path))
    assert not (tmp_path / "2").exists()
    run()
    assert (tmp_path / "2").exists() and not (tmp_path / "1").exists()
    run()
    assert (tmp_path / "1").exists()
    with pytest.raises(ProgramError, match=r"contestant .* ended with exit code 1"):
        run()


@pytest.mark.slow
def test_a_contestant_that_died_between_turns_is_a_line(tmp_path, monkeypatch):
    (tmp_path / "killed.py").write_text(
        "import os\nfrom jaxformer.benchmarks.suite import ANSWER\nos.close(0)\n"
        "print(ANSWER, end='', flush=True)\nos._exit(9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    run = in_process("killed")
    with pytest.raises(ProgramError, match="killed ended with exit code 9"):
        run()


def test_a_gpu_gets_enough_to_do():
    assert attention.work_of(1024, "cpu") == (1, 1)
    assert attention.work_of(1024, "cuda") == (32, 10)
    assert attention.work_of(65536, "cuda") == (1, 10)


def test_only_some_contestants(monkeypatch):
    """Of the train step; the others are not even started. The product by which they are judged is always there."""
    monkeypatch.setattr(train, "need_peers", lambda suite: None)
    started = []
    monkeypatch.setattr(train, "in_process", lambda *command: started.append(command[1]))
    for only, expected in ((None, 3 if shutil.which("g++") else 2), ("jaxformer", 1), ("torch, eager", 1)):
        started.clear()
        options = SimpleNamespace(shape="tiny", dtype="float32", rows=None, only=only)
        assert list(train.contestants(options).contestants)[-1] == RULER and len(started) == expected
    assert started == ["eager"]


def test_bad_flags_are_one_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmark", "--suite=data", "--rows=0"])
    with pytest.raises(ConfigError, match="--rows: 0; accepted: at least 1"):
        benchmark.main()


@pytest.mark.slow
def test_new_tokens_come_in_blocks_after_texts_of_every_length(monkeypatch):
    monkeypatch.setattr(decode_lengths, "LENGTHS", (8, 16))
    suite = decode_lengths.contestants(SimpleNamespace(shape="tiny", dtype="float32", rows=None, pairs=1))
    assert list(suite.contestants) == ["window 128, after 8", "window 128, after 16", "all, after 8", "all, after 16"]
    benchmark.alternate(suite.contestants, rounds=1)  # one block to warm up, one measured
    for run in suite.contestants.values():
        with pytest.raises(StopIteration):
            run()


def test_a_peer_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr(suite.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--suite=memory needs torch and transformers"):
        memory.contestants(SimpleNamespace(shape="tiny", dtype="float32"))


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # torch's and transformers' own
@pytest.mark.parametrize("shape", seq2seq.SHAPES)
def test_the_encoder_decoders_of_both_sides_are_one_model(shape):
    import torch

    cfg = seq2seq.model_of(shape, "float32")
    with torch.device("meta"):
        peer = seq2seq.peer(cfg)
    theirs = sum(p.numel() for p in peer.parameters())
    if cfg.positions.kind == "learned":  # BART's tables begin at 2, and have a place for the longer side
        theirs -= 2 * 2 * cfg.width
    if shape == "tiny":  # transformers 5 ties v1.1 as well, whatever its config says
        theirs += cfg.vocab_size * cfg.width * (peer.lm_head.weight is peer.shared.weight)
    assert count_parameters(cfg).total == theirs


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_encoder_decoders_train_and_search(monkeypatch):
    import torch

    torch.set_num_threads(1)  # threads that wait for each other are slow where other processes work
    monkeypatch.setattr(seq2seq, "NEW_TOKENS", 4)
    for who in ("eager", "ours"):
        seq2seq.steps(who, "tiny", "float32", 1, "cpu")()
    found = seq2seq.contestants(SimpleNamespace(shape="tiny", dtype="float32", rows=1, task="beam")).contestants
    assert list(found)[:2] == ["transformers on torch", "jaxformer"]
    for run in found.values():
        run()
