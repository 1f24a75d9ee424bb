"""Times the kernels of `flash_gpu` with several sizes of blocks on this GPU, and keeps the fastest.

    python -m jaxformer.benchmarks.autotune                  (writes kernels/attention/flash_gpu_blocks.json)
    python -m jaxformer.benchmarks.autotune --table=blocks.json --dry    (tiny, by Pallas's interpreter, anywhere)

Packed documents, causal, bfloat16, as a pretraining has them. A size that does not compile, because it needs more
shared memory or registers than there are, is left out. Then one token's attention to a long cache, by these kernels and
by XLA's products: the table gets a row where the kernels are faster, and decoding takes them there.
"""

import functools
import itertools
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.config.fields import shown
from jaxformer.errors import ConfigError
from jaxformer.kernels.attention import flash_gpu_blocks
from jaxformer.kernels.attention.flash_gpu_blocks import KERNELS, FlashBlock
from jaxformer.runs.command_line import parser

TOKENS, HEADS, DOCUMENT = 32768, 16, 700
CALLS = 10  # in one measurement
ROWS = 8  # of a cache
CANDIDATES = [
    FlashBlock(queries, keys, warps, stages)
    for queries, keys, warps, several in (
        (64, 32, 4, (2, 3, 4)),
        (64, 64, 4, (2, 3, 4)),
        (128, 32, 4, (3,)),
        (128, 32, 8, (3,)),
        (64, 128, 4, (2,)),
        (64, 128, 8, (3,)),
        (128, 64, 4, (3,)),
        (128, 64, 8, (2, 3)),
        (128, 128, 8, (2,)),
    )
    for stages in several
]


class TimedShape(NamedTuple):
    """What is timed: rows of so many tokens, heads of a width."""

    length: int
    width: int


def main() -> None:
    """Prints a line for each kernel and shape, and writes the table after each."""
    arguments = parser(__doc__, "autotune")
    arguments.add_argument("--table", default=str(flash_gpu_blocks.TABLE), metavar="FILE", help="to be written")
    arguments.add_argument("--runs", type=int, default=10, metavar="N", help="timed runs of each size (default 10)")
    arguments.add_argument(
        "--shapes", default="2048x64,8192x64,2048x128,8192x128", metavar="LIST",
        help="lengths of rows and widths of heads to time (default 2048x64,8192x64,2048x128,8192x128)",
    )  # fmt: skip
    arguments.add_argument("--dry", action="store_true", help="tiny shapes in Pallas's interpreter, on any device")
    options = arguments.parse_args()
    shapes = [TimedShape(40, 16)] if options.dry else parsed(options.shapes)
    candidates = [FlashBlock(16, 16, 4, 1), FlashBlock(32, 16, 4, 1)] if options.dry else CANDIDATES
    for shape, kernel in itertools.product(shapes, KERNELS):
        timed = sorted(times(kernel, shape, candidates, 1 if options.dry else options.runs, options.dry))
        if not timed:
            raise SystemExit(f"{kernel} {shape}: none of {len(candidates)} sizes compiles")
        seconds, block = timed[0]
        before = flash_gpu_blocks.block_of(kernel, "", shape.width, "bfloat16", shape.length)
        earlier = next((f"{1e6 * t:.0f}" for t, other in timed if other == before), "not tried")
        print(
            f"{kernel} {shape.length} x {shape.width}: {tuple(block)} {1e6 * seconds:.0f} us; {tuple(before)} {earlier}"
        )
        keep(Path(options.table), kernel, shape, block, seconds)
    caches = [TimedShape(600, 16)] if options.dry else [TimedShape(n, k) for k in (64, 128) for n in (32768, 4096)]
    for shape in caches:
        ours, xla = decoding(shape, 1 if options.dry else options.runs, options.dry)
        print(f"decode {shape.length} x {shape.width}: {1e6 * ours:.0f} us; XLA's products {1e6 * xla:.0f}")
        block = flash_gpu_blocks.block_of("forward", "", shape.width, "bfloat16", shape.length)
        keep(Path(options.table), "decode", shape, block if ours < xla else None, ours)


def parsed(shapes: str) -> list[TimedShape]:
    """Shapes from "2048x64,8192x128".

    Raises:
      ConfigError: another form.
    """
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(,[1-9]\d*x[1-9]\d*)*", shapes):
        raise ConfigError(f"--shapes: {shown(shapes)}; accepted: LENGTHxWIDTH, several with commas between")
    return [TimedShape(*map(int, each.split("x"))) for each in shapes.split(",")]


def keep(table: Path, kernel: str, shape: TimedShape, block: FlashBlock | None, seconds: float) -> None:
    """Puts a row into the table, in the place of an earlier one for the same; None: only takes that one out."""
    import jax

    row = {
        "chip": jax.devices()[0].device_kind, "kernel": kernel, "width": shape.width, "bytes": 2,
        "length": shape.length, "block": list(block or ()), "microseconds": round(1e6 * seconds, 1),
    }  # fmt: skip
    rows = json.loads(table.read_text(encoding="utf-8")) if table.exists() else []
    same = ("chip", "kernel", "width", "bytes", "length")
    rows = [other for other in rows if any(other[name] != row[name] for name in same)] + [row] * (block is not None)
    table.write_text("[\n" + ",\n".join(json.dumps(each) for each in rows) + "\n]\n", encoding="utf-8")


def times(
    kernel: str, shape: TimedShape, candidates: list[FlashBlock], runs: int, interpret: bool
) -> Iterator[tuple[float, FlashBlock]]:
    """Median seconds of a kernel with each size that compiles: all are compiled side by side, then timed alone."""
    import jax

    with ThreadPoolExecutor() as pool:
        problems = [problem(kernel, shape, block, interpret) for block in candidates]
        programs = [pool.submit(jax.jit(call).lower(*arrays).compile) for call, arrays in problems]
    for block, program, (_, arrays) in zip(candidates, programs, problems, strict=True):
        try:
            compiled = program.result()
            jax.block_until_ready(compiled(*arrays))
        except jax.errors.JaxRuntimeError as error:
            print(f"{kernel} {tuple(block)}: {str(error).splitlines()[0][:100]}")
            continue
        yield statistics.median(_timed(compiled, arrays) for _ in range(runs)), block


def _timed(call: Callable[..., Any], arrays: list[Any]) -> float:
    """Seconds of a call, of several that wait for each other on the device: what starts them is hidden behind them."""
    import jax

    began = time.perf_counter()
    for _ in range(CALLS):
        out = call(*arrays)
    jax.block_until_ready(out)
    return (time.perf_counter() - began) / CALLS


def decoding(shape: TimedShape, runs: int, interpret: bool) -> tuple[float, float]:
    """Median seconds of one token's attention to a cache, by the kernels and by XLA's products, run in turns."""
    import jax
    import jax.numpy as jnp

    from jaxformer.kernels.attention import decode, flash_gpu, flash_gpu_decode
    from jaxformer.masks import Mask

    flash_gpu.INTERPRET = interpret
    rows, heads = (1, 2) if interpret else (ROWS, HEADS)
    options: Any = {"scale": 0.1, "soft_cap": None}
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (rows, 1, heads, shape.width), jnp.bfloat16)
    cache = [jax.random.normal(key, (rows * heads, *shape), jnp.bfloat16) for key in keys[1:]]
    places = jnp.broadcast_to(jnp.arange(shape.length, dtype=jnp.int32), (rows, shape.length))
    arrays = [query, *cache, places]
    calls = [
        jax.jit(lambda q, k, v, places: flash_gpu_decode.attend_one(q, k, v, Mask(key_index=places), **options)),
        jax.jit(lambda q, k, v, places: decode.attend_one(q, k, v, Mask(key_index=places), None, **options)),
    ]
    for call in calls:
        jax.block_until_ready(call(*arrays))
    found = [[_timed(call, arrays) for call in calls] for _ in range(runs)]
    return tuple(map(statistics.median, zip(*found, strict=True)))  # type: ignore[return-value]


def problem(kernel: str, shape: TimedShape, block: FlashBlock, interpret: bool) -> tuple[Callable[..., Any], list[Any]]:
    """A call of one kernel on packed rows, and its arrays."""
    import jax
    import jax.numpy as jnp

    from jaxformer import masks
    from jaxformer.kernels.attention.flash_gpu_backward import key_gradients, query_gradients
    from jaxformer.kernels.attention.flash_gpu_forward import forward
    from jaxformer.kernels.attention.flash_gpu_launch import FlashInputs, FlashNormalizer
    from jaxformer.kernels.attention.flash_gpu_scores import FlashOptions
    from jaxformer.kernels.attention.flash_gpu_visits import visits

    length, width = shape
    rows, heads = (1, 2) if interpret else (TOKENS // length, HEADS)
    segments = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32) // DOCUMENT, (rows, length))
    mask = masks.causal() & masks.segments(segments)
    o = FlashOptions(
        scale=width**-0.5, soft_cap=None, dropout_rate=0.0, causal=True, window=None, hides=True, edges=None,
        all_heads=heads, queries=length, keys=length, heads=heads, groups=heads, width=width, interpret=interpret,
    )  # fmt: skip
    query, key, value, g = (
        jax.random.normal(k, (rows, length, heads, width), jnp.bfloat16) for k in jax.random.split(jax.random.key(0), 4)
    )
    sizes = length, length, block.queries, block.keys
    visited = jax.jit(lambda mask: visits(mask, *sizes, by_key=kernel == "keys"))(mask)
    numbers = jnp.zeros((rows, heads, length), jnp.float32)

    def call(query, key, value, g, numbers, segments, visited):
        x = FlashInputs(query, key, value, dict.fromkeys(("query_segments", "key_segments"), segments[:, None]))
        if kernel == "forward":
            return forward(o, x, visited, block)
        gradients = {"keys": key_gradients, "queries": query_gradients}[kernel]
        return gradients(o, x, visited, block, FlashNormalizer(numbers, numbers), numbers, g)

    return functools.partial(call), [query, key, value, g, numbers, segments, visited]


if __name__ == "__main__":
    main()
