"""A run evaluated on other text than its own."""

import pytest
from quick_runs import quickly
from token_folders import saved, tokens_of

from jaxformer.config import DataConfig
from jaxformer.runs import evaluation, pretrain
from jaxformer.runs.command_line import parse_config, parser
from jaxformer.runs.evaluation import OtherText, evaluate

TINY = [
    "--config.model.num_layers=1", "--config.model.width=16", "--config.model.attention.num_heads=2",
    "--config.model.context_length=16", "--config.data.tokenizer=bytes", "--config.train.steps=2",
    "--config.optimizer.warmup_steps=0",
    "--config.train.global_batch_size=8", "--config.compilation_cache=false", "--config.data.separator=|",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    (folder / "train.txt").write_text("all happy families are alike|each unhappy one is its own|" * 40)
    (folder / "held.txt").write_text("everything was in confusion|in the house|" * 9)
    files = [f"--config.data.files={folder}/train.txt", f"--config.data.validation_files={folder}/held.txt"]
    places = [f"--config.workdir={folder / 'run'}", f"--config.data.cache_dir={folder / 'cache'}"]
    with quickly():
        pretrain.pretrain(parse_config(parser("", "test"), ["gpt_tiny", *places, *files, *TINY]))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, "data=2,fsdp=2"])
def test_what_was_held_out_given_as_other_text_has_the_same_loss(trained, mesh):
    own = evaluate(trained / "run", cache_dir=str(trained / "cache"), mesh=mesh, log=lambda _: None)
    said = []
    found = evaluate(trained / "run", other=OtherText((f"{trained}/held.txt",)), mesh=mesh, log=said.append)
    text = found.pop("text")
    assert found == own and text["num_documents"] == 18 and text["files"] == [f"{trained}/held.txt"]
    assert said[0].startswith(f"{trained}/run at step 2, on 1 other file: loss ") and not said[2:]


@pytest.mark.slow
def test_a_saved_dataset_and_token_shards_of_the_same_text_have_the_same_loss(trained):
    held_out = (trained / "held.txt").read_text().strip("|").split("|")
    pytest.importorskip("pyarrow")
    saved(trained / "saved", held_out)
    files = {"files": (f"{trained}/train.txt",), "validation_files": (f"{trained}/held.txt",), "separator": "|"}
    tokens_of(DataConfig(tokenizer="bytes", cache_dir=f"{trained}/cache", **files), trained / "shards", 2)
    own = evaluate(trained / "run", cache_dir=str(trained / "cache"), log=lambda _: None)
    for folder, words in (("saved", "on 2 other files"), ("shards", f"on what is held out in {trained}/shards")):
        said = []
        found = evaluate(trained / "run", other=OtherText((f"{trained}/{folder}",)), log=said.append)
        assert found.pop("text")["num_documents"] == 18 and found == own
        assert said[0].startswith(f"{trained}/run at step 2, {words}: loss ")


@pytest.mark.slow
def test_it_says_that_a_run_was_trained_on_the_text(trained):
    said = []
    evaluate(trained / "run", other=OtherText((f"{trained}/*.txt",), separator="|"), log=said.append)
    assert said[-1] == "note: 1 of these files is among those that the run was trained on"


@pytest.mark.slow
def test_nothing_stays_behind_and_a_row_alone_has_no_error(trained, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "one.txt").write_text("short")
    said = []
    found = evaluation.evaluate(trained / "run", other=OtherText((f"{tmp_path}/one.txt",)), log=said.append)
    assert found["rows"] == 1 and " ± " not in said[0]
    assert said[-1] == "note: the text fits one row, so its loss has no standard error"
    assert not list((tmp_path / "jaxformer" / "staging").iterdir())
