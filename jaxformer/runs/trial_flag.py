"""The flag --trial of programs whose stage "plan" says how long a study takes."""

import argparse

from jaxformer.errors import ConfigError


def add_trial(arguments: argparse.ArgumentParser) -> None:
    """Gives a program whose stage "plan" says how long it takes the flag --trial."""
    arguments.add_argument(
        "--trial",
        action="store_true",
        help="with --stage=plan: learn the time from a few updates of each size, which are compiled for that",
    )


def asks_trial(options: argparse.Namespace) -> bool:
    """True if --trial is given. Raises ConfigError with another stage than the plan."""
    if options.trial and options.stage != "plan":
        raise ConfigError("--trial: is for plans; accepted with --stage=plan")
    return options.trial
