# ruff: noqa: N999  # named as its command
"""Make a run of a model of the library transformers.

    jaxformer import pythia-70m --workdir=runs/pythia
    jaxformer import llama --workdir=runs/llama --mesh=fsdp=8
    jaxformer import llama_adapter --base=runs/llama --workdir=runs/tuned

The folder holds config.json, safetensors and tokenizer.json. What it becomes is a run: `jaxformer generate`,
`evaluate --files=...`, `fill-mask`, `export` and `pretrain --config.init_from=...` open it. With --mesh every device
reads its own part, and no whole tensor is in memory. Needs the extra `hf`; transformers itself is not needed.

With --base the folder holds adapters that the library peft wrote; they are put beside the weights of that run.
"""

from jaxformer.errors import ConfigError
from jaxformer.runs.command_line import parser, path_text, workdir_text


def main() -> None:
    """Reads the weights, writes the run, and says what it is."""
    arguments = parser(__doc__, "import")
    arguments.add_argument("directory", type=path_text, metavar="DIRECTORY", help="folder of the model")
    arguments.add_argument("--workdir", required=True, type=workdir_text, metavar="RUN", help="directory of the run")
    arguments.add_argument("--tokenizer", type=path_text, metavar="FILE", help="tokenizer.json (the folder's own)")
    arguments.add_argument("--mesh", metavar="AXIS=N,...", help="devices to read it onto, as fsdp=4,tensor=2")
    arguments.add_argument("--base", type=workdir_text, metavar="RUN", help="run that adapters in the folder belong to")
    options = arguments.parse_args()
    if options.base is not None:
        from jaxformer.runs.imported_adapter import import_adapter_run

        if options.tokenizer is not None:
            raise ConfigError(f"--tokenizer: {options.tokenizer}; with --base it is that run's; accepted: none")
        import_adapter_run(options.directory, options.base, options.workdir, mesh=options.mesh)
        return

    from jaxformer.runs.imported_run import import_run

    import_run(options.directory, options.workdir, mesh=options.mesh, tokenizer=options.tokenizer)
