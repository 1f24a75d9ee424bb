"""The command `jaxformer PROGRAM ...`, also `python -m jaxformer PROGRAM ...`."""

import importlib
import sys
from typing import NamedTuple

import jaxformer
from jaxformer.config.fields import nearest


class Command(NamedTuple):
    """A program of the command.

    Attributes:
      about: one line.
      printing: its result is what it prints, so that it fails where that cannot be written.
    """

    about: str
    printing: bool = True


COMMANDS = {
    "pretrain": Command("train a model, or go on with its training", printing=False),
    "evaluate": Command("held-out loss of a run, with its standard error"),
    "lm-eval": Command("evaluate a run on few-shot tasks of lm-eval"),
    "generate": Command("continue a prompt with a GPT, or answer a source with an encoder-decoder"),
    "translate": Command("translate a file line by line with an encoder-decoder"),
    "fill-mask": Command("fill in the masks of a text with a BERT"),
    "predict": Command("label texts with a run that learned a task"),
    "import": Command("make a run of a model of the library transformers"),
    "export": Command("write a run's model for the library transformers"),
    "curves": Command("plot the loss curves of runs"),
    "sweep": Command("a grid of runs that differ in some fields, and how they compare", printing=False),
    "scaling": Command("a scaling study: a ladder of runs, fits with intervals, a report", printing=False),
    "compare": Command("what changes are worth: compute multipliers with intervals", printing=False),
    "fit": Command("scaling laws with intervals, from any table"),
    "tokenize": Command("tokenise text on any number of machines, into shards that runs read"),
    "plan": Command("memory, communication and time of a config on devices that are not here"),
    "benchmark": Command("time jaxformer beside what one would use instead"),
    "configs": Command("list the configs that come with jaxformer, or print one"),
}


def main() -> None:
    """Runs the program that the command line names."""
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: jaxformer PROGRAM ...\n")
        print("\n".join(f"  {each:{width}}  {command.about}" for each, command in COMMANDS.items()))
        print("\njaxformer PROGRAM --help says more. Start with: jaxformer pretrain gpt_tiny")
        return
    if name == "--version":
        print(f"jaxformer {jaxformer.__version__}")
        return
    name = name.replace("_", "-")
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        hint = f"did you mean {near}?" if near else f"accepted: {', '.join(COMMANDS)}"
        print(f"error: {name!r}: no such program; {hint}", file=sys.stderr)
        sys.exit(2)
    sys.argv[1:] = words
    run(name)


def run(name: str) -> None:
    """Runs one program with the flags in `sys.argv[1:]`, and ends the process with its exit code."""
    from jaxformer.runtime.program import program

    sys.argv[0] = f"jaxformer {name}"
    module = f"jaxformer.programs.{name.replace('-', '_')}"
    # Imported inside, because an error of the environment may come up there.
    program(lambda: importlib.import_module(module).main(), printing=COMMANDS[name].printing)


if __name__ == "__main__":
    main()
