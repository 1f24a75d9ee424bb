"""Pretrain a GPT or a BERT: config -> data + model + training -> run.

    python -m experiments.pretrain --config=configs/gpt_tiny.py
    python -m experiments.pretrain --config=configs/gpt_tiny.py --config.model.num_layers=6 --config.workdir=runs/deep

The same command goes on with a run that was stopped or killed.
"""

from jaxformer.command_line import parse_config, parser
from jaxformer.process import program


def main() -> int:
    """Exit code: 0 finished, 75 interrupted and saved (start again to go on), 3 diverged, 2 refused or leaking."""
    parsed = parse_config(parser(__doc__, "pretrain"))
    from jaxformer.main import pretrain  # after the command line, so that a misspelt field is answered at once

    return 75 if pretrain(parsed).status == "interrupted" else 0


if __name__ == "__main__":
    program(main)
