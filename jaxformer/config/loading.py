"""Config files: Python files with a function get_config(). Found by their path, or by name if they come with jaxformer.

A config file of yours can start from another one:

>>> def get_config():
...     config = load("gpt2_124m")
...     config["model"] |= {"num_layers": 6, "positions": "rotary"}
...     return config
>>> get_config()["model"]["width"]
768
"""

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxformer.config.fields import nearest
from jaxformer.config.reading import plain
from jaxformer.errors import ConfigError


def shipped() -> dict[str, Path]:
    """The configs that come with jaxformer, by name: of a wheel, or of a checkout's folder configs/."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "configs"
    folder = inside if inside.is_dir() else package.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.py")) if path.stem != "__init__"}


def load(source: str) -> dict[str, Any]:
    """What get_config of a config file returns, as plain nested dicts.

    The folder of the file is added to the end of `sys.path`, so that it can import files beside it.

    Args:
      source: "FILE.py", the name of a config that comes with jaxformer, or either with ":ARGUMENT", which get_config
        is then called with. A file goes before a name.

    Raises:
      ConfigError: no such file, or it defines no get_config, or anything that happens in it; with the line.
    """
    file, argument = split(source)
    if not os.path.isfile(file):  # of a name that no file can have, too
        raise ConfigError(f"--config: no file {file}{_instead(file)}")
    if file.suffix != ".py":
        raise ConfigError(f"--config: {file}; accepted: a Python file with get_config(), FILE.py or FILE.py:ARGUMENT")
    spec = importlib.util.spec_from_file_location(f"config_file_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the types that they name
    if (folder := str(file.parent.absolute())) not in sys.path:
        sys.path.append(folder)
    with blamed(file):
        spec.loader.exec_module(module)
    if not callable(getattr(module, "get_config", None)):
        raise ConfigError(f"--config: {file} defines no get_config()")
    with blamed(file, f" get_config({argument!r}):" if argument else " get_config():"):
        mapping = module.get_config(argument) if argument else module.get_config()
        if not hasattr(mapping, "items"):
            raise TypeError(f"returned {type(mapping).__name__}; accepted: a ConfigDict or a dict")
        return plain(mapping)


def is_loaded(source: str) -> bool:
    """Whether a config file of this name was loaded in this process."""
    return f"config_file_{split(source)[0].stem}" in sys.modules


def split(source: str) -> tuple[Path, str]:
    """The file, which need not exist, and the argument of "FILE:ARGUMENT"; a file may have a colon in its name."""
    if os.path.isfile(source):
        return Path(source), ""
    name, _, argument = source.partition(":")
    return shipped().get(name, Path(name)) if not os.path.isfile(name) else Path(name), argument


def _instead(file: Path) -> str:
    """What to write instead of a file that is not there."""
    if file.stem in shipped():
        return f"; did you mean {file.stem}, which comes with jaxformer?"
    found = file.parent.glob("*.py") if os.path.isdir(file.parent) else []
    others = sorted(str(path) for path in found if path.name != "__init__.py")
    near = nearest(str(file), [*others, *shipped()])
    if near:
        return f"; did you mean {near}?"
    if others:
        return f"; there are {', '.join(others)}"
    return "" if file.is_absolute() else f" (looked in {Path.cwd()}); `jaxformer configs` lists those that come with it"


@contextlib.contextmanager
def blamed(file: Path, call: str = "", passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns whatever a config file does wrong, leaving the program included, into a ConfigError of one line.

    The line number is that of the file's own code; where none of it has run, `call` says what was tried. `passing`:
    errors that are left as they are.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, *passing)):
            raise
        where, reason = f"{file}:{call}", f"{type(error).__name__}: {error}"
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if Path(f.filename).absolute() == file.absolute()]
        if isinstance(error, ConfigError):
            reason = str(error).removeprefix("--config: ")
        if isinstance(error, SyntaxError):
            where, reason = f"{error.filename or file}:{error.lineno or ''}", error.msg
        elif lines:
            where = f"{file}:{lines[-1]}:"
        elif isinstance(error, TypeError | ValueError | KeyError):
            reason = str(error)
        if isinstance(error, SystemExit):
            reason = f"leaves the program (exit code {error.code}); accepted: a file that defines get_config()"
        raise ConfigError(f"--config: {where.rstrip(':')}: {' '.join(reason.split())[:300]}") from error
