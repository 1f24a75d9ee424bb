"""Predict memory, communication and time of a config on other devices, by compiling its real train step for them.

    jaxformer plan llama_7b --topology=v5e:16x16
    jaxformer plan llama_7b --topology=h100:4x8 --config.mesh.tensor=8
    jaxformer plan gpt_tiny --topology=cpu:4 --search
    jaxformer plan --diff old.json new.json

TPUs need the extra `plan` (libtpu, on any Linux machine), GPUs the extra `cuda`, cpu:N needs nothing.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from jaxformer.config import Config
from jaxformer.errors import ConfigError
from jaxformer.runs.command_line import integer, parse_config, parser, path_text
from jaxformer.storage.files import write_atomically


def main() -> int:
    """Exit code: 0 if the config fits (or the device's memory is unknown), 2 if it is invalid or does not fit."""
    arguments = parser(__doc__, "plan")
    arguments.add_argument("--topology", metavar="CHIP:SHAPE", help="v5e:16x16, v5p:4x4x8, h100:4x8, cpu:8, ...")
    arguments.add_argument(
        "--json", type=path_text, metavar="FILE", help="write the plan to it; compare two with --diff"
    )
    arguments.add_argument("--search", action="store_true", help="try meshes and remat policies, rank those that fit")
    arguments.add_argument(
        "--tries", type=integer(1, 10_000), default=12, metavar="N", help="programs that --search compiles at most"
    )
    if sys.argv[1:2] == ["--diff"]:
        return difference([word for word in sys.argv[2:] if word != "--debug"])
    parsed = parse_config(arguments)
    options = parsed.options
    if options.topology is None:
        raise ConfigError("--topology: needs one, such as v5e:16x16, h100:4x8 or cpu:8")
    if options.json is not None:
        check_writable(options.json)  # before minutes of compiling
    from jaxformer.plan import measures, search, summary, topology

    topology.prepare(options.topology)
    target = topology.make(options.topology)
    if options.search:
        found = search.search(parsed.config, target, tries=options.tries, log=print)
        print("\n".join(["", *search.lines(found), *assumed(parsed.config, found[0].plan)]))
        _write(options.json, [one.plan for one in found])
        return 0 if any(one.plan["memory"]["fits"] is not False for one in found) else 2
    plan = measures.make_plan(parsed.config, target)
    print("\n".join([*summary.lines(plan), *assumed(parsed.config, plan)]))
    _write(options.json, plan)
    if plan["memory"]["fits"] is False:
        raise ConfigError(summary.remedy(plan))
    return 0


def assumed(config: Config, plan: dict[str, Any]) -> list[str]:
    """What a plan takes for the vocabulary's size, if only the text could tell."""
    from jaxformer.data import vocabulary

    if config.model.vocab_size is not None or vocabulary.known(config.data) is not None:
        return []
    return [f"note: config.model.vocab_size: none; {plan['config']['model']['vocab_size']} is assumed"]


def difference(files: list[str]) -> int:
    """Prints the differences between the plans in two JSON files."""
    from jaxformer.plan.summary import compare

    if len(files) != 2:
        raise ConfigError("--diff: needs two files that --json wrote")
    plans = []
    for name in files:
        try:
            plans.append(json.loads(Path(name).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--diff: {name} holds no plan ({error})") from None
    print("\n".join(compare(*plans)))
    return 0


def check_writable(name: str) -> None:
    """Raises ConfigError if this file cannot be written; does not create it."""
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        what = f"{path} is a folder" if path.is_dir() else f"{path.parent} is no folder"
        raise ConfigError(f"--json: {what}; accepted: a file to write, in a folder that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--json: {path} cannot be written to")


def _write(name: str | None, value: object) -> None:
    if name is None:
        return
    content = json.dumps(value, indent=1, sort_keys=True) + "\n"
    try:
        if Path(name).exists() and not Path(name).is_file():  # a pipe, /dev/stdout
            Path(name).write_text(content, encoding="utf-8")
        else:
            write_atomically(name, content)
    except OSError as error:
        raise ConfigError(f"--json: {name} cannot be written ({error.strerror or error})") from None
