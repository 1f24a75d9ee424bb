"""The code of a page, and a process that runs it: all blocks in order, in one empty folder.

A fence says what is done with its block: ```python runs in one namespace for the page, ```sh in a shell, and a title
(```python title="mine.py") writes the file that later blocks use. What needs a cluster, a TPU or the network stands in
```console and is not run; `test_pages.py` says which commands may.

    python -m tests.docs.pages docs/quickstart.md    (the blocks run in the current folder)
"""

import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INCLUDED = re.compile(r"^--8<--\n(.*)\n--8<--\n", re.MULTILINE)  # as pymdownx.snippets has it


class Block(NamedTuple):
    """A block of code: its language, the file that it is written to (or None), its text and its first line's number."""

    language: str
    title: str | None
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, files that it includes filled in."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        indent, language, about, body = fence.groups()
        body = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        body = INCLUDED.sub(lambda name: (ROOT / name[1]).read_text(encoding="utf-8"), body)
        title = re.search(r'title="(.*?)"', about)
        found.append(Block(language, title and title[1], body, text.count("\n", 0, fence.start()) + 2))
    return found


def run(page: Path) -> None:
    """Runs every block of a page, as a reader would who pastes them in order. Ends the process at the first failure."""
    namespace = {"__name__": "__main__"}
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if block.title is not None:
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            try:
                exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)
            except BaseException:
                traceback.print_exc()
                sys.exit(f"{where}: failed")
        elif block.language == "sh":
            print(f"== {where}", flush=True)
            code = subprocess.run(["bash", "-eu", "-o", "pipefail", "-c", block.text]).returncode
            if code:
                sys.exit(f"{where}: exit code {code}")


if __name__ == "__main__":
    run(Path(sys.argv[1]).resolve())
