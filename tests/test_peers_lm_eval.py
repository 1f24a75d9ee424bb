"""lm-eval's tasks on an imported GPT-2 of random weights: our numbers are those of its Hugging Face backend."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers as hf

from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.interchange import import_model
from jaxformer.runs.few_shot import FewShot, evaluate_tasks, load_tasks, run_tasks
from jaxformer.runs.harness import HarnessModel
from jaxformer.runs.imported_run import import_run

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # torch's and transformers' own warnings
CONTEXT = 48
RNG = np.random.default_rng(0)
WORDS = ["the", "a", "quick", "brown", "red", "fox", "dog", "jumps", "sleeps", "over", "old", "river", "tree", "and"]


def sentence(count):
    return " ".join(RNG.choice(WORDS, count))


def asked(*args):
    return SimpleNamespace(args=args, task_name=None)


def write_tasks(folder):
    """Multiple choice, generation and perplexity; the last of texts that are longer than the context."""
    choices = [{"question": sentence(4), "choices": [sentence(n) for n in (1, 2, 3)], "gold": n % 3} for n in range(12)]
    texts = [{"text": sentence(n)} for n in (3, 70, 150)]
    for name, lines in (("choices", choices), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields = {
        "my_choice": {
            "output_type": "multiple_choice", "fewshot_split": "train", "doc_to_text": "Q: {{question}}\nA:",
            "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "my_answer": {
            "output_type": "generate_until", "fewshot_split": "train", "doc_to_text": "Q: {{question}}\nA:",
            "doc_to_target": "{{choices[gold]}}", "metric_list": [{"metric": "chrf"}],
            "generation_kwargs": {"until": ["\n\n", "og"], "max_gen_toks": 12, "do_sample": False},
        },
        "my_text": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        },
    }  # fmt: skip
    for name, own in fields.items():
        files = str(folder / ("texts.jsonl" if name == "my_text" else "choices.jsonl"))
        data = {"data_files": {"train": files, "test": files}, "cache_dir": str(folder / "cache")}
        about = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **own}
        (folder / f"{name}.yaml").write_text(json.dumps(about))  # which is YAML


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A folder of tasks, a run, and the same model in the harness's own backend."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch
    import transformers
    from lm_eval.models.huggingface import HFLM

    top = tmp_path_factory.mktemp("lm_eval")
    write_tasks(top)
    made = hf.Tokenizer(hf.models.BPE())
    made.pre_tokenizer, made.decoder = hf.pre_tokenizers.ByteLevel(add_prefix_space=False), hf.decoders.ByteLevel()
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([sentence(200)], trainer)
    text = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=4, vocab_size=len(text), n_positions=CONTEXT, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(top / "hf")
    text.save_pretrained(top / "hf")
    import_run(top / "hf", str(top / "run"), log=lambda line: None)
    return top, HFLM(pretrained=model, tokenizer=text, batch_size=8), HarnessModel.of_run(top / "run")


def agree(ours, theirs):
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    np.testing.assert_allclose([x for x, _ in ours], [x for x, _ in theirs], atol=1e-4)


def test_tasks_have_the_numbers_of_the_other_backend(there, monkeypatch, capsys):
    top, theirs, ours = there
    tasks = FewShot(("my_*",), num_fewshot=2, include_path=str(top), limit=8)
    monkeypatch.setattr(HarnessModel, "of_run", lambda workdir, **settings: ours)  # compiled once for all tests
    found = run_tasks(top / "run", tasks)
    printed = capsys.readouterr().out
    wanted = evaluate_tasks(theirs, load_tasks(tasks), tasks)
    assert found["results"].keys() == {"my_choice", "my_answer", "my_text"} and found["n-shot"]["my_choice"] == 2
    numbers = 0
    for task, metrics in wanted["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float) and "stderr" not in name:
                assert found["results"][task][name] == pytest.approx(value, rel=1e-4), (task, name)
                numbers += 1
    assert numbers == 6 and wanted["results"]["my_answer"]["chrf,none"] > 1
    (path,) = (top / "run" / "lm_eval").iterdir()
    kept = json.loads(path.read_text())
    assert kept["results"]["my_text"] == found["results"]["my_text"] and kept["run"]["step"] == 0
    assert "|my_choice|" in printed.replace(" ", "") and f"written to {path}" in printed


def test_log_probabilities_and_what_is_greedy(there):
    """No context, a space at its end, one that is too long, two boundaries of tokens, and what the model would say."""
    _, theirs, ours = there
    contexts = ["", "the fox ", "the fox", "the", sentence(60), sentence(10), "\nA", sentence(26)]
    requests = [asked(context, more) for context in contexts for more in (" dog", "dog", " sleeps over the old tree")]
    open_ended = [context for context in contexts if context]
    said = greedy_of(theirs, open_ended, {"max_gen_toks": 3})
    likely = [asked(context, text) for context, text in zip(open_ended, said, strict=True)]
    found = ours.loglikelihood(requests + likely)
    agree(found, theirs.loglikelihood(requests + likely, disable_tqdm=True))
    assert {greedy for _, greedy in found} == {True, False}
    assert ours.loglikelihood([asked("\n", "A")]) == ours.loglikelihood([asked("", "\nA")])


def test_whole_texts_in_windows(there):
    _, theirs, ours = there
    texts = [asked(sentence(n)) for n in (1, 10, 40, 48, 120)] + [asked("é" * CONTEXT), asked("é" * (CONTEXT // 2))]
    found, wanted = ours.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-4)


def test_continuations_up_to_a_stop_text(there):
    _, theirs, ours = there
    contexts = ["the fox", sentence(9), sentence(60), "Q:\nA:", "red dog and then"]
    free = greedy_of(theirs, contexts, {"max_gen_toks": 12})
    stops = [text[len(text) // 2 :][:2] for text in free]  # inside or across tokens
    cut = greedy_of(theirs, contexts, {"until": stops, "max_gen_toks": 12})
    assert greedy_of(ours, contexts, {"max_gen_toks": 12, "until": "<|endoftext|>"}) == free != cut
    assert greedy_of(ours, contexts, {"max_gen_toks": 12, "until": stops}) == cut
    with pytest.raises(ConfigError, match=r"^max_gen_toks: 48 new tokens of a context of 48; accepted: less"):
        ours.generate_until([asked("the", {"max_gen_toks": 48})])


def greedy_of(model, contexts, settings):
    return model.generate_until([asked(context, dict(settings)) for context in contexts], disable_tqdm=True)


def test_a_template_that_begins_every_text(there):
    """As Llama's tokenizer has one: what it puts there counts as the other backend counts it."""
    top, theirs, ours = there
    folder, text = top / "hf", theirs.tokenizer
    made = hf.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.post_processor = hf.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    text._tokenizer.post_processor = made.post_processor
    tokenizer = Tokenizer(made, {"separator": "<|endoftext|>"})
    found = import_model(folder)
    model = HarnessModel(found.params, found.config, tokenizer)
    model._score = ours._score  # compiled
    requests = [asked("the fox", " sleeps"), asked("", " dog")]
    agree(model.loglikelihood(requests), theirs.loglikelihood(requests, disable_tqdm=True))
    texts = [asked(sentence(12))]
    wanted = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    np.testing.assert_allclose(model.loglikelihood_rolling(texts), wanted, atol=1e-4)
    assert abs(wanted[0] - ours.loglikelihood_rolling(texts)[0]) > 1
    text._tokenizer.post_processor = hf.processors.ByteLevel(trim_offsets=False)
