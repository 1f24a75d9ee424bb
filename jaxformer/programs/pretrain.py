"""Pretrain a GPT or a BERT: config -> data + model + training -> run.

    jaxformer pretrain gpt_tiny
    jaxformer pretrain gpt_tiny --config.model.num_layers=6 --config.workdir=runs/deep

The same command continues a run that was stopped or killed.
"""

import signal

from jaxformer.runs.command_line import add_verify, parse_config, parser


def main() -> int:
    """Exit code: 0 finished, 75 interrupted and saved (start again to go on), 3 diverged, 2 a user error or a leak of
    validation text; with several processes also 124 (no progress for too long), or an abort's if another one died."""
    arguments = parser(__doc__, "pretrain")
    arguments.add_argument("--newest-step", action="store_true", help="only print the newest checkpoint's step, or 0")
    add_verify(arguments)
    parsed = parse_config(arguments)
    if parsed.options.newest_step:  # used by the scripts of launch/ to detect progress
        from jaxformer.training.checkpoint.layout import list_steps

        print(max(list_steps(f"{parsed.config.workdir}/checkpoints"), default=0))
        return 0
    from jaxformer.runs.pretrain import pretrain  # after parsing, so that a misspelt field is reported at once

    if pretrain(parsed).status != "interrupted":
        return 0
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # schedulers repeat it; only the exit code is left to return
    return 75
