"""An eighth of the standard library's files, for pages and their commands, which import this.

A run of `gpt_tiny` begins with a tokenizer and ends with an evaluation on the whole held-out text: that took most of
the time. `.ci/run short` has a run on all of it, and so has a page whose environment says EVERY_FILE: the ladder of
`scaling_tiny` needs more text than that.
"""

import os
import zlib

from jaxformer.data import stdlib_source

every = stdlib_source.stdlib_files


def few(split: str | None = None) -> list[str]:
    """Every eighth or so, by the name."""
    if "EVERY_FILE" in os.environ:
        return every(split)
    return [name for name in every(split) if zlib.crc32(name.encode()) % 8 == 0]


stdlib_source.stdlib_files = few
