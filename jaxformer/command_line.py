"""`--config=FILE[:argument]` and `--config.section.field=value`: from a command line to a Config.

argparse reads the program's own flags. The overrides are read by the type their field has (`config.from_mapping`);
ml_collections' own flag parser is not used because it cannot set a field to None, splits no tuples, and answers a
misspelt field with a traceback.
"""

import argparse
import difflib
import importlib.util
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.config import Config, ConfigError, diff, from_mapping, to_dict


class Parsed(NamedTuple):
    """What a command line asked for.

    Attributes:
      config: the whole config, overrides applied.
      overrides: lines "field: old -> new", what the overrides changed against the config file.
      source: the config file and its argument, as given.
      given: field -> text of every override, as given.
      options: the program's own flags.
    """

    config: Config
    overrides: list[str]
    source: str
    given: dict[str, str]
    options: argparse.Namespace


def parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """An argument parser of `python -m experiments.NAME` whose help is the program's own docstring, with `--log`."""
    made = argparse.ArgumentParser(
        prog=f"python -m experiments.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--log", action=_Log, nargs=0, help="say on standard error what it chooses by itself, and why")
    return made


class _Log(argparse.Action):
    """Sends what the logger "jaxformer" is told to standard error, every line once."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        seen: set[str] = set()

        def new(record: logging.LogRecord) -> bool:  # what is traced twice says the same twice
            line = record.getMessage()
            told = line in seen
            seen.add(line)
            return not told

        handler = logging.StreamHandler()
        handler.addFilter(new)
        logger = logging.getLogger("jaxformer")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def parse_config(parser: argparse.ArgumentParser, argv: list[str] | None = None, cls: type[Config] = Config) -> Parsed:
    """Reads the config file and the overrides of a command line into a `cls`.

    Raises:
      ConfigError: no such file, no get_config in it, or anything `config.from_mapping` refuses.
    """
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE[:ARGUMENT]",
        help="a file with get_config(); override its fields with --config.section.field=value",
    )
    known, rest = parser.parse_known_args(_joined(sys.argv[1:] if argv is None else argv))
    overrides = {}
    for word in rest:
        match = re.fullmatch(r"--config\.([\w.]+)(?:=(.*))?", word, re.DOTALL)
        if match is None:
            raise ConfigError(f"{word}: no such flag; see --help, and --config.section.field=value for config fields")
        if match[2] is None:
            raise ConfigError(f"{word}: needs a value, as in {word}=VALUE")
        overrides[match[1]] = match[2]
    mapping = load_file(known.config)
    base = from_mapping(mapping, cls=cls)
    config = from_mapping(mapping, overrides, cls)
    if "workdir" not in mapping:
        base = replace(base, workdir=f"runs/{Path(known.config.split(':')[0]).stem}")
        config = config if "workdir" in overrides else replace(config, workdir=base.workdir)
    return Parsed(config, diff(to_dict(base), to_dict(config)), known.config, overrides, known)


def _joined(argv: list[str]) -> list[str]:
    """`--config.a.b VALUE` as `--config.a.b=VALUE`."""
    words: list[str] = []
    for word in argv:
        if words and re.fullmatch(r"--config\.[\w.]+", words[-1]) and not word.startswith("--"):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def load_file(source: str) -> Any:
    """What get_config of "FILE" or "FILE:ARGUMENT" returns.

    Raises:
      ConfigError: no such file, or it defines no get_config, or get_config refuses the argument.
    """
    name, _, argument = source.partition(":")
    path = Path(name)
    if not path.is_file():
        found = path.parent.glob("*.py") if path.parent.is_dir() else []
        others = sorted(str(p) for p in found if p.name != "__init__.py")
        near = difflib.get_close_matches(name, others, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(others)}" if others else ""
        raise ConfigError(f"--config: no file {name}{hint}")
    spec = importlib.util.spec_from_file_location(f"config_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(f"--config: {name}:{error.lineno}: {error.msg}") from None
    if not hasattr(module, "get_config"):
        raise ConfigError(f"--config: {name} defines no get_config()")
    try:
        mapping = module.get_config(argument) if argument else module.get_config()
    except (TypeError, ValueError, KeyError) as error:
        shown = f"get_config({argument!r})" if argument else "get_config()"
        raise ConfigError(f"--config: {name}: {shown}: {error}") from None
    if not hasattr(mapping, "items"):
        raise ConfigError(f"--config: {name}: get_config() returned {type(mapping).__name__}; accepted: a ConfigDict")
    return mapping
