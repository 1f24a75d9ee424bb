"""How many entries a config's vocabulary will have, as far as that is known before its text is read.

>>> known(DataConfig(source="markov", language_symbols=20)), known(DataConfig(tokenizer="bytes"))
(26, 262)
>>> known(DataConfig(tokenizer="chars")) is None
True
"""

from jaxformer.config import DataConfig
from jaxformer.data import sources, tokenizers
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.storage.address import is_address


def known(data: DataConfig) -> int | None:
    """Tokens of the tokenizer that a run would have; None: only its text, or a file that is not here, can tell."""
    named = [data.tokenizer_file or "", *(name for part in data.parts().values() for name in part.tokens)]
    if any(map(is_address, named)):
        return None  # a plan asks no network
    try:
        if data.tokenizer_file is not None:
            return Tokenizer.load(data.tokenizer_file).vocab_size
        for part in data.parts().values():
            source = sources.SOURCES[str(part.source)]
            if source.tokens is not None:
                return source.tokens(part, False).tokenizer.vocab_size
            if source.alphabet is not None:
                return tokenizers.train("chars", [source.alphabet(part)], None).vocab_size
    except ConfigError:  # they may be on the machines that the plan is for
        return None
    return tokenizers.train("bytes", [], None).vocab_size if data.tokenizer == "bytes" else None
