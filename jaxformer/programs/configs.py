"""List the configs that come with jaxformer, or print one, to begin your own with.

    jaxformer configs
    jaxformer configs gpt_tiny > mine.py
    jaxformer pretrain mine.py

`jaxformer pretrain CONFIG --print-config` prints the whole config, with all defaults.
"""

import ast

from jaxformer.config.fields import nearest, shown
from jaxformer.config.loading import shipped
from jaxformer.errors import ConfigError
from jaxformer.runs.command_line import parser


def main() -> None:
    """Prints a line for each config, or the text of one."""
    arguments = parser(__doc__, "configs")
    arguments.add_argument("name", nargs="?", metavar="CONFIG", help="print the text of this one")
    name, found = arguments.parse_args().name, shipped()
    if name is None:
        width = max(map(len, found))
        for each, path in found.items():
            about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            print(f"{each:{width}}  {about.splitlines()[0]}")
    elif name in found:
        print(found[name].read_text(encoding="utf-8"), end="")
    else:
        near = nearest(name, found)
        hint = f"did you mean {near}?" if near else f"accepted: {', '.join(found)}"
        raise ConfigError(f"{shown(name)[1:-1]}: no config that comes with jaxformer; {hint}")
