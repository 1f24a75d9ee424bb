"""Texts to arrays of tokens in batches of about a megabyte, with the cores busy all the time: while `tokenizers`
encodes one batch, the next is read and the one before is turned into arrays.

>>> from jaxformer.data import tokenizers
>>> tokenizer = tokenizers.train("bytes", [], None)
>>> (batch,) = encoded(["to be", "or"], tokenizer, "<u2")
>>> len(batch.tokens), batch.starts.tolist(), batch.num_bytes
(9, [0, 6], 7)
"""

import collections
import concurrent.futures
from collections.abc import Iterable, Iterator

from jaxformer.data import ingest
from jaxformer.data.tokenizers import Tokenizer

_AT_ONCE = 2  # batches in the making, besides the one that is read


def encoded(texts: Iterable[str], tokenizer: Tokenizer, dtype: str) -> Iterator[ingest.Encoded]:
    """The tokens of some documents end to end, each opened by the tokenizer's separator; the same however they are
    batched.

    Raises:
      ConfigError: a text has no UTF-8 form.
    """
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        pending: collections.deque = collections.deque()
        try:
            for batch in ingest.batched(texts):
                pending.append(pool.submit(ingest.encode, batch, tokenizer, dtype))
                if len(pending) > _AT_ONCE:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
