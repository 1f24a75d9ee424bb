"""`--config=FILE[:argument]` and `--config.section.field=value`: from a command line to a Config.

argparse reads the program's own flags. The overrides are read by the type their field has (`config.from_mapping`);
ml_collections' own flag parser is not used because it cannot set a field to None, splits no tuples, and answers a
misspelt field with a traceback.
"""

import argparse
import logging
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from jaxformer.config import Config, diff, from_mapping, load, reference, registry, to_dict
from jaxformer.config.fields import MOST_INTEGER, at_home, did_you_mean, from_text, nearest, shown
from jaxformer.config.loading import blamed, split
from jaxformer.errors import ConfigError
from jaxformer.storage import credentials

FIELD = r"--config\.[\w.]+"
# What argparse says, and what we say instead.
ARGPARSE_ERRORS = {
    r"^argument (-[^:/ ]*)[^:]*: ": r"\1: ",
    r": expected (one|at least one) argument$": ": needs a value",
    r": ignored explicit argument .*$": ": takes no value",
    r": invalid int value: (.*)$": r": \1 is not an integer",
    r": invalid float value: (.*)$": r": \1 is not a number",
    r"^the following arguments are required: ([^ ,]+).*$": r"\1: is needed; see --help",
}
CONFIG_HELP = """fields of the config:
  --config.section.field=VALUE   none: absent; 1e6, 1_000_000: integers; ~/a: in the home folder
  --config.data.files=a.txt,'b/*.gz'   lists are separated by commas
  --config.data.files='"a,b.txt",c'    what holds a comma or begins with ( [ " or ' in quotation marks, as in CSV

all of them, with their defaults, what they accept and what they mean:
"""


class Parsed(NamedTuple):
    """What a command line asked for.

    Attributes:
      config: the whole config, overrides applied.
      overrides: lines "field: old -> new", what the overrides changed against the config file.
      source: the config file and its argument, as given.
      given: field -> text of every override, as given.
      options: the program's own flags.
      beside: what the config file has beside the config's own sections, by name.
    """

    config: Config
    overrides: list[str]
    source: str
    given: dict[str, str]
    options: argparse.Namespace
    beside: Mapping[str, Any] = MappingProxyType({})


class Parser(argparse.ArgumentParser):
    """argparse's, whose errors are one line: ConfigError with the flag, the value and what is accepted.

    Attributes:
      flags: all of them.
      takes_fields: True if --config.section.field sets a field.
    """

    def __init__(self, **settings: Any):
        self.flags: list[str] = []
        self.takes_fields = False
        super().__init__(**settings)

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """As argparse's; flags are remembered, to name the nearest of a misspelt one."""
        action = super().add_argument(*names, **settings)
        self.flags += action.option_strings
        return action

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        """As argparse's, but only fields of a config may be unknown. Raises ConfigError."""
        words = list(sys.argv[1:] if args is None else args)
        for word in words[: words.index("--") if "--" in words else None]:
            name = word.split("=")[0]
            field = self.takes_fields and re.fullmatch(FIELD, name)
            if word.startswith("--") and name not in self.flags and not field:
                self._unknown(name)
        return super().parse_known_args(words, namespace)

    def parse_args(self, args=None, namespace=None):  # type: ignore[override]
        """As argparse's. Raises ConfigError."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            self._unknown(rest[0])
        if "run" in vars(found):
            found.workdir = self._one_run(found.run, found.workdir)
        if getattr(found, "extension", None) is not None:
            load(found.extension)
        return found

    def _one_run(self, name: str | None, workdir: str | None) -> str:
        if name and workdir:
            raise ConfigError(f"--workdir: {shown(workdir)} beside {shown(name)}; accepted: one of the two")
        if not (name or workdir):
            raise ConfigError("--workdir: is needed; see --help")
        return name or workdir or ""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError, instead of printing the usage and leaving."""
        message = " ".join(message.split())
        for pattern, ours in ARGPARSE_ERRORS.items():
            message = re.sub(pattern, ours, message)
        choice = re.search(r": invalid choice: '?(.*?)'? \(choose from (.*)\)$", message)
        if choice is not None:
            accepted = [each.strip("' ") for each in choice[2].split(",")]
            hint = did_you_mean(choice[1], accepted)
            message = f"{message[: choice.start()]}: {choice[1]!r}; accepted: {', '.join(accepted)}{hint}"
        raise ConfigError(message)

    def _unknown(self, name: str) -> NoReturn:
        if not name.startswith("-"):
            raise ConfigError(f"{shown(name)}: is a word too many; see --help")
        near = nearest(name, self.flags) if name.startswith("-") else ""
        first, dot, rest = name.partition(".")
        if dot and first.startswith("--") and self.takes_fields:
            near = f"--config.{rest if nearest(first, ['--config'], 0.7) else name[2:]}"
        hint = f"did you mean {near}?" if near else "see --help"
        if near == name:
            hint = "accepted: names of letters, digits and _"
        if not near and self.takes_fields:
            hint += ", and --config.section.field=value for config fields"
        if dot and "--config" in self.flags and not self.takes_fields:
            hint = "this program takes no fields of the config, which are those of the run in --workdir"
        raise ConfigError(f"{shown(name)[1:-1]}: no such flag; {hint}")


def parser(doc: str | None, name: str) -> Parser:
    """A parser of `jaxformer NAME` whose help is the program's docstring, with `--log` and `--debug`."""
    made = Parser(
        prog=f"jaxformer {name}", description=doc, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("--log", action=_Log, nargs=0, help="say on standard error what it chooses by itself, and why")
    # Read by `runtime.program.program`, which must know where nothing could be parsed.
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return made


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Reads a flag's integer; says what is accepted where it is less than `low`, or more than `high` (None: as counters
    hold). For `add_argument(type=...)`."""
    accepted = f"{low} to {high}" if high is not None else ""

    def read(text: str) -> int:
        try:
            value = from_text(text, int, "")
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(": ")) from None
        if value < low or value > (MOST_INTEGER if high is None else high):
            bound = f"at least {low}" if value < low else f"at most {MOST_INTEGER}"
            raise argparse.ArgumentTypeError(f"{shown(value)}; accepted: {accepted or bound}")
        return value

    return read


def finite(text: str) -> float:
    """Reads a flag's number, which is finite. For `add_argument(type=...)`."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text}; accepted: a finite number")
    return value


def path_text(text: str, *, addresses: bool = False) -> str:
    """Reads a flag's path: not empty, ~ is the home folder. For `add_argument(type=...)`."""
    if not text:
        raise argparse.ArgumentTypeError("'' is empty (an unset variable?); accepted: a path")
    try:
        return at_home(text, "", addresses=addresses)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(": ")) from None


def workdir_text(text: str) -> str:
    """As `path_text`; the address of an object store is one, too."""
    return path_text(text, addresses=True)


def _config_text(text: str) -> str:
    """As `path_text`, with an argument after a colon that may be anything."""
    file, colon, argument = text.partition(":")
    return path_text(file) + colon + argument if colon and file else path_text(text)


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
        logger.propagate = False  # libraries give the root logger a handler, which would print each line once more
        logger.setLevel(logging.INFO)


def file_path(text: str) -> Path:
    """As `path_text`, a Path."""
    return Path(path_text(text))


def add_workdir(arguments: argparse.ArgumentParser) -> None:
    """Gives a program that opens a run its directory, as an argument or --workdir, --mesh and, for kinds that are not
    built in, --config.

    The run's manifest is not asked for its config file: a folder from elsewhere must not decide what is executed here.
    """
    arguments.add_argument("run", nargs="?", type=workdir_text, metavar="RUN", help="directory of the run")
    arguments.add_argument("--workdir", type=workdir_text, metavar="RUN", help="the same")
    arguments.add_argument(
        "--mesh", metavar="AXIS=N,...", help="devices to spread it over, as fsdp=4,tensor=2, or run: the run's own mesh"
    )
    arguments.add_argument(
        "--config", dest="extension", type=_config_text, metavar="FILE",
        help="the run's config file, needed where it brings layers, a family, an objective or a source of its own",
    )  # fmt: skip


def add_verify(arguments: argparse.ArgumentParser) -> None:
    """Gives a program that opens a corpus the flag --verify."""
    arguments.add_argument(
        "--verify",
        action="store_true",
        help="hash the text again, even if no file looks changed, and check every block of the kept corpus",
    )


def parse_config(
    parser: Parser,
    argv: Sequence[str] | None = None,
    cls: type[Config] = Config,
    *,
    needed: bool = True,
    beside: Sequence[str] = (),
) -> Parsed:
    """Reads the config file and the overrides of a command line into a `cls`; without one, unless it is `needed`, the
    defaults. `beside`: names that the file may have beside the sections of a `cls`.

    Raises:
      ConfigError: no such file, no get_config in it, or anything `config.from_mapping` refuses.
    """
    about = "a file with get_config(), or a name that `jaxformer configs` lists; :ARGUMENT is handed to get_config"
    parser.add_argument("name", nargs="?", type=_config_text, metavar="CONFIG[:ARGUMENT]", help=about)
    parser.add_argument("--config", type=_config_text, metavar="CONFIG[:ARGUMENT]", help="the same")
    parser.add_argument("--print-config", action="store_true", help="print the whole config as a config file, and end")
    parser.epilog, parser.takes_fields = CONFIG_HELP + reference.help_text(cls), True
    overrides, words = {}, []
    for word in _joined(sys.argv[1:] if argv is None else argv):
        if match := re.fullmatch(rf"({FIELD})(?:=(.*))?", word, re.DOTALL):
            if match[2] is None:
                raise ConfigError(f"{word}: needs a value, as in {word}=VALUE")
            overrides[match[1].removeprefix("--config.")] = match[2]
        else:  # argparse would take one with a space in it for a config's name
            words.append(word)
    known, rest = parser.parse_known_args(words)
    if rest:
        parser._unknown(rest[0])
    if known.name and known.config:
        raise ConfigError(f"--config: {shown(known.config)} beside {shown(known.name)}; accepted: one of the two")
    source = known.config or known.name
    if source is None and not needed:
        config = from_mapping({}, overrides, cls)
        return Parsed(config, diff(to_dict(from_mapping({}, cls=cls)), to_dict(config)), "", overrides, known)
    if source is None:
        raise ConfigError("--config: is needed; `jaxformer configs` lists those that come with it")
    mapping = load(source)
    others = {name: mapping.pop(name) for name in beside if name in mapping}
    with blamed(split(source)[0], passing=(ConfigError,)):
        base = from_mapping(mapping, cls=cls)
        config = from_mapping(mapping, overrides, cls)
        config.model.attention.summary()
    if "workdir" not in mapping:
        base = replace(base, workdir=f"runs/{split(source)[0].stem}")
        config = config if "workdir" in overrides else replace(config, workdir=base.workdir)
    if known.print_config:
        words = credentials.mask_command(sys.argv[1:] if argv is None else argv)
        about = f"Printed by {sys.argv[0]} {shlex.join(words)}"
        own = not registry.is_built_in(config) or registry.has_own_trackers(config)
        brings = str(split(source)[0].absolute()) if own else None
        print(reference.as_file(config, about, brings), end="")
        raise SystemExit(0)
    return Parsed(config, diff(to_dict(base), to_dict(config)), source, overrides, known, others)


def _joined(argv: Sequence[str]) -> list[str]:
    """`--config.a.b VALUE` as `--config.a.b=VALUE`."""
    words: list[str] = []
    for word in argv:
        if words and re.fullmatch(FIELD, words[-1]) and not word.startswith("--"):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words
