"""Every implementation of attention, and of products of groups of rows, on this device against float64 on its host:
output, gradients, and what leaks.

    python -m jaxformer.benchmarks.exactness --out=exactness.jsonl
    python -m jaxformer.benchmarks.exactness --out=exactness.jsonl --dry    (tiny, by Pallas's interpreter, anywhere)

A record is one implementation with one kind of mask or bias in one dtype: the greatest error of each array, relative to
the array's largest number, and whether a document's gradient reaches another's keys. The exit code is 1 if an error is
above what the dtype's rounding allows (`BOUNDS`; float32 products may be TF32), or anything leaks.
"""

import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxformer.runs.command_line import file_path, parser

FOR_ALL = ("packed", "t5 and soft cap")  # cases of what XLA alone computes; the others are tested on CPU
BOUNDS = {"float32": 5e-3, "bfloat16": 3e-2, "float16": 5e-3}


def main() -> None:
    """One line and one record for each."""
    arguments = parser(__doc__, "exactness")
    arguments.add_argument("--out", type=file_path, help="JSONL file to append the records to")
    arguments.add_argument("--dry", action="store_true", help="tiny shapes in Pallas's interpreter, on any device")
    options = arguments.parse_args()
    wrong = 0
    for record in itertools.chain(records(options.dry), group_records(options.dry)):
        wrong += not record["ok"]
        said = ", ".join(f"{name} {error:.1e}" for name, error in record["errors"].items())
        print(
            f"{record['implementation']} {record['case']} {record['dtype']}: {said}{'' if record['ok'] else '  WRONG'}"
        )
        if options.out is not None:
            with open(options.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    sys.exit(int(wrong > 0))


def records(dry: bool) -> Iterator[dict[str, Any]]:
    """A record for each implementation that is here, case and dtype that it can do."""
    import jax

    from jaxformer.functional.attention_choice import EVERYWHERE, KERNELS, unavailable
    from jaxformer.kernels.attention import flash_gpu

    flash_gpu.INTERPRET = dry
    names = ["flash_gpu"] if dry else [n for n in (*KERNELS, *EVERYWHERE) if unavailable(n) is None]
    shape = (2, 70, 4, 2, 16) if dry else (2, 1100, 4, 2, 64)
    kinds = list(itertools.product(cases(shape).items(), BOUNDS))
    if dry:
        kinds = [k for k in kinds if (k[0][0], k[1]) in (("packed", "bfloat16"), ("t5 and soft cap", "float32"))]

    def exact(make: Any) -> list[Any]:
        with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
            return gradients(make, "xla", arrays(shape, "float64"))

    def found(make: Any, dtype: str, name: str) -> list[Any] | None:
        try:
            return gradients(make, name, arrays(shape, dtype))
        except ValueError as error:  # what it cannot do exactly, it refuses
            if "cannot do" not in str(error):
                raise
            return None

    with ThreadPoolExecutor() as pool:  # nearly all of the time is compilation, which needs no lock of Python's
        references = {case: pool.submit(exact, make) for (case, make), _ in kinds}
        started = [
            (name, case, dtype, pool.submit(found, make, dtype, name))
            for ((case, make), dtype), name in itertools.product(kinds, names)
            if name not in EVERYWHERE or case in FOR_ALL
        ]
        for name, case, dtype, one in started:
            if (result := one.result()) is not None:
                yield record(name, case, dtype, result, references[case].result())


def record(name: str, case: str, dtype: str, found: list[Any], exact: list[Any]) -> dict[str, Any]:
    """What is written of one comparison. The last array of each is the gradient that must not be there."""
    errors = {
        what: float(np.abs(np.asarray(a, np.float64) - b).max() / max(1e-9, np.abs(b).max()))
        for what, a, b in zip(("out", "query", "key", "value", "table"), found, exact, strict=False)
    }
    leaks = bool(np.asarray(found[-1], np.float64).any())
    return {
        "implementation": name, "case": case, "dtype": dtype, "errors": errors, "leaks": leaks,
        "ok": not leaks and all(error <= BOUNDS[dtype] for error in errors.values()),
    }  # fmt: skip


def arrays(shape: tuple[int, ...], dtype: str) -> list[Any]:
    """query, key, value, the gradient of the output, and T5's table: numbers that every dtype has, 127/32 at most."""
    import jax.numpy as jnp

    rows, length, heads, groups, width = shape
    rng = np.random.default_rng(0)
    sizes = [(rows, length, heads, width), *[(rows, length, groups, width)] * 2, (rows, length, heads, width)]
    numbers = [np.clip(np.round(32 * rng.normal(size=s)), -127, 127) / 32 for s in (*sizes, (32, heads))]
    return [jnp.asarray(x, dtype) for x in numbers[:4]] + [jnp.asarray(numbers[4], np.float32)]


def cases(shape: tuple[int, ...]) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """name -> (table -> mask and bias, other options of `attention`)."""
    import jax.numpy as jnp

    from jaxformer import masks
    from jaxformer.functional import positions
    from jaxformer.kernels.attention import distance_bias

    rows, length, heads, _, _ = shape
    at = np.arange(length)
    segments = np.stack([at * 7 // length, at * at // (length * length // 5)])[:rows].astype(np.int32)
    packed = masks.causal() & masks.segments(jnp.asarray(segments))
    ends = jnp.asarray([length // 3, 5])[:rows]

    def plain(mask: Any) -> Callable[..., Any]:
        return lambda table: (mask, None)

    def alibi(table: Any) -> Any:
        function = functools.partial(positions.alibi, num_heads=heads)
        return packed, distance_bias.linear(function, positions.alibi_slopes(heads))

    def t5(table: Any) -> Any:
        function = functools.partial(positions.t5_bias, bidirectional=False)
        return packed, distance_bias.stepwise(function, table, *positions.t5_steps(False))

    return {
        "causal": (plain(masks.causal()), {}),
        "packed": (plain(packed), {}),
        "window": (plain(packed & masks.window(max(5, length // 6))), {}),
        "prefix": (plain(masks.prefix(ends)), {}),
        "padding": (plain(masks.padding(jnp.asarray(at[None] < length - 9))), {}),
        "alibi": (alibi, {}),
        "t5 and soft cap": (t5, {"soft_cap": 5.0}),
    }


def gradients(case: tuple[Callable[..., Any], dict[str, Any]], implementation: str, given: list[Any]) -> list[Any]:
    """Output, gradients of query, key, value and table; and the gradient of the first query by all other keys."""
    import jax
    import jax.numpy as jnp

    from jaxformer.functional.attention import attention

    make, options = case
    *inputs, g, table = (jnp.asarray(x) for x in given)

    def run(query, key, value, table):
        mask, bias = make(table)
        return attention(query, key, value, mask, bias=bias, implementation=implementation, **options)

    @jax.jit
    def all_of_them(inputs, table, g):
        out, back = jax.vjp(run, *inputs, table)
        alone = back(jnp.zeros_like(g).at[:, 0].set(g[:, 0]))[1][:, 1:] if make(table)[0].causal else jnp.zeros(())
        return [out, *back(g), alone]

    found = all_of_them(inputs, table, g)
    return [np.asarray(x.astype(jnp.float32) if x.dtype.itemsize == 2 else x) for x in found]


def group_records(dry: bool) -> Iterator[dict[str, Any]]:
    """A record for each implementation of products of groups that is here, and dtype."""
    import jax
    import jax.numpy as jnp

    from jaxformer.functional.grouped_choice import GROUPED, unavailable
    from jaxformer.kernels.grouped import blocks_gpu

    blocks_gpu.INTERPRET = dry
    groups, rows, width, out = (3, 64, 64, 64) if dry else (8, 8192, 512, 1024)
    rng = np.random.default_rng(0)
    sizes = [(rows, width), (groups, width, out), (groups, out, width), (rows, width)]
    x, first, last, g = (np.clip(np.round(32 * rng.normal(size=size)), -127, 127) / 32 for size in sizes)
    first, last = first / width**0.5, last / out**0.5  # float16 ends at 65,504
    counts = rng.multinomial(rows // 2, rng.dirichlet(np.full(groups - 1, 0.5)))  # one group has none

    def found(name: str, dtype: str) -> list[Any]:
        align = GROUPED[name].alignment(rows, groups)
        each = -(-np.append(counts, 0) // align) * align
        begins = np.cumsum(each) - each
        place = np.concatenate([begin + np.arange(n) for begin, n in zip(begins, counts, strict=False)])
        total = int(each.sum()) + align  # a block of no group at the end

        @jax.jit
        def run(x: Any, first: Any, last: Any, g: Any) -> list[Any]:
            def layer(x: Any, first: Any, last: Any) -> Any:
                spread = jnp.zeros((total, width), x.dtype).at[place].set(x)
                given = jnp.asarray(each, jnp.int32)
                return GROUPED[name].mlp_of(jnp.square, spread, (first,), last, given, align)[place]

            made, back = jax.vjp(layer, x, first, last)
            return [made, *back(g)]

        arrays = [jnp.asarray(a, dtype) for a in (x[: len(place)], first, last, g[: len(place)])]
        arrays[1:3] = (a.astype(jnp.promote_types(dtype, jnp.float32)) for a in arrays[1:3])
        return [np.asarray(a, np.float64) for a in run(*arrays)]

    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        exact = found("blocks", "float64")
    names = ["blocks_gpu"] if dry else [name for name in GROUPED if unavailable(name) is None and name != "blocks"]
    for name, dtype in itertools.product(names, ("bfloat16",) if dry else BOUNDS):
        parts = zip(("out", "rows", "first", "last"), found(name, dtype), exact, strict=True)
        errors = {what: float(np.abs(a - b).max() / np.abs(b).max()) for what, a, b in parts}
        within = all(error <= BOUNDS[dtype] for error in errors.values())
        yield {"implementation": name, "case": "groups", "dtype": dtype, "errors": errors, "leaks": False, "ok": within}


if __name__ == "__main__":
    main()
