"""Write a run's model as a folder that the library transformers opens.

    jaxformer export runs/gpt_tiny --out=gpt_tiny_hf
    jaxformer export runs/bert_tiny --out=bert_tiny_hf --dtype=bfloat16
    jaxformer export runs/tuned --out=tuned_adapter --adapter
    jaxformer export runs/classifier --out=classifier_hf

The folder holds config.json, safetensors and the tokenizer: `AutoModelForCausalLM.from_pretrained("gpt_tiny_hf")` and
`AutoTokenizer.from_pretrained("gpt_tiny_hf")` open it; a run that was tuned for a task is what config.json names, such
as `AutoModelForSequenceClassification`, with the names of its labels. Needs the extra `hf`, not transformers itself.

Of a run with adapters (tune.lora_rank) they are merged into the weights; with --adapter they are written alone, as the
library peft has them.
"""

from jaxformer.config import Config
from jaxformer.errors import ConfigError
from jaxformer.runs.command_line import add_workdir, parser, path_text


def main() -> None:
    """Writes the newest valid checkpoint's weights, and says what they are there."""
    arguments = parser(__doc__, "export")
    add_workdir(arguments)
    arguments.add_argument("--out", required=True, type=path_text, metavar="DIR", help="folder to write")
    arguments.add_argument(
        "--dtype", metavar="DTYPE", help="float32, bfloat16 or float16 (float32; of an imported run what it was)"
    )
    arguments.add_argument("--adapter", action="store_true", help="write the adapters alone, in peft's format")
    options = arguments.parse_args()

    from jaxformer.interchange.adapter_files import CONFIG, WEIGHTS, export_adapter
    from jaxformer.interchange.architectures import type_for
    from jaxformer.interchange.exporting import DTYPES, check_folder, check_new, export_model
    from jaxformer.interchange.tokenizer_files import special_ids, write_tokenizer
    from jaxformer.models.lora import merge_lora
    from jaxformer.runs import manifest
    from jaxformer.runs.pretrain import open_run

    if options.dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype: {options.dtype!r} is not one of {', '.join(DTYPES)}")
    if options.adapter and options.dtype is not None:
        raise ConfigError(f"--dtype: {options.dtype}; adapters are float32; accepted: without --adapter")
    config: Config = manifest.read_config(options.workdir)
    if options.adapter and not config.tune.lora_rank:
        raise ConfigError(f"--adapter: {options.workdir} has none; accepted: a run with tune.lora_rank")
    if options.adapter and config.model.head is not None:
        raise ConfigError(
            f"--adapter: {options.workdir} has a head for {config.model.head.task}, which learned beside its adapters; "
            "accepted: without --adapter, both merged"
        )
    if options.adapter:
        check_new(options.out, (CONFIG, WEIGHTS))
    else:
        check_folder(options.out)
    imported = manifest.read(options.workdir).get("imported", {})
    dtype = options.dtype or imported.get("dtype", "float32")
    type_for(config.model)  # what cannot be written is refused before it is read
    run = open_run(options.workdir, options.mesh)
    cfg = run.config.model
    kind = imported.get("model_type")
    tokens = special_ids(run.tokenizer, cfg.family)
    if cfg.head is not None:  # by which a classifier finds the last token of each row of a batch
        tokens = {"pad_token_id": tokens["eos_token_id"]} | tokens
    try:
        if options.adapter:
            name = export_adapter(cfg, run.params, options.out, config.tune, model_type=kind)
            print(f"{options.out}: adapters of a {name}, of {options.workdir} at step {run.step}")
            return
        name = export_model(
            cfg, merge_lora(run.params), options.out, dtype=dtype, model_type=kind,
            special_tokens=tokens,
            labels=(config.data.labelled and config.data.labelled.labels) or (),
        )  # fmt: skip
        write_tokenizer(options.out, run.tokenizer, cfg, run.config.data, imported.get("tokenizer_config"))
    except OSError as error:
        raise ConfigError(
            f"--out: {options.out} cannot be written ({error.strerror}); what lies there is not whole"
        ) from None
    print(f"{options.out}: {name}, {dtype}, of {options.workdir} at step {run.step}")
