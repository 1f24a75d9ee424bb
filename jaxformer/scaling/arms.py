"""The runs of one ladder as a comparison needs them: its points, what the choice of rates may hide, its held-out rows.

Rates are tried on a coarse grid, so the best one tried is a little worse than the best there is; how much, a parabola
through the losses of a rate and its two neighbours tells. A comparison does not know whether the other ladder lost as
much: `excess` goes into its interval.

>>> packed = pack_rows(np.array([3.5, 2.25]), np.array([64.0, 64.0]))
>>> losses, weights = unpack_rows(packed)
>>> losses.tolist(), weights.tolist()
([3.5, 2.25], [64.0, 64.0])
"""

import base64
import binascii
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxformer.errors import ConfigError

Floats = np.ndarray
Record = Mapping[str, Any]

# Fields of a final record: the losses of the held-out rows; a digest of what they ask for (earlier records have none).
ROWS, TARGETS = "row_losses", "row_targets"
NEEDED = ("run", "role", "status", "width", "params", "flops", "tokens", "seed", "learning_rate", "loss", "loss_stderr")
POSITIVE = ("params", "flops", "tokens", "learning_rate", "loss")  # of a point of the ladder: their logs are used
_MOST_EXCESS = 0.02  # a parabola that promises more than 2 % is not believed
_MOST_ROWS = 2**24


class Arm(NamedTuple):
    """The finished ladder runs of a baseline or a variant, in ascending compute. Suffixes: I run, J held-out row.

    Attributes:
      names: of the runs.
      n, c: [I] parameters and training FLOP.
      loss: [I] held-out loss.
      stderr: [I] its standard error over the held-out rows.
      excess: [I] how much lower log loss would be at the best rate, as far as the rates tried tell.
      seconds: [I] measured seconds of a whole run; nan where not known.
      seeds: [I].
      rows: [I, J] loss of each held-out row, if all runs kept them.
      weights: [J] tokens of each row.
      edges: a line for each size whose best rate is the lowest or highest tried.
      targets: digest of what the held-out rows ask for; None: not known.
    """

    names: tuple[str, ...]
    n: Floats
    c: Floats
    loss: Floats
    stderr: Floats
    excess: Floats
    seconds: Floats
    seeds: Floats
    rows: Floats | None
    weights: Floats | None
    edges: tuple[str, ...]
    targets: str | None


def arm(records: Sequence[Record], called: str) -> Arm:
    """The ladder of a study's records.

    Args:
      records: of a study: its final records have the fields of `NEEDED`; others are not read.
      called: "baseline" or the variant's name, for messages.

    Raises:
      ConfigError: a final record lacks a field, no run of the ladder has finished, or one has a number that has no
        logarithm.
    """
    finals = [record for record in records if record.get("kind") == "final"]
    for record in finals:
        if missing := [name for name in NEEDED if name not in record]:
            raise ConfigError(f"{called}: the final record of {record.get('run', '?')} lacks {', '.join(missing)}")
    points = [record for record in finals if record["role"] == "ladder" and record["status"] == "finished"]
    if not points:
        raise ConfigError(f"{called}: none of {len(finals)} runs is a finished point of the ladder")
    for record in points:
        for name in POSITIVE:
            if record[name] is None or not 0 < record[name] < math.inf:
                raise ConfigError(f"{called}: {record['run']}: {name} {record[name]}; accepted: a number above 0")
    points.sort(key=lambda record: (record["flops"], record["params"], record["seed"]))
    lost = _excesses(finals)
    seconds = _seconds(finals)
    known = [excess for excess in lost.values() if math.isfinite(excess)]
    usual = float(np.mean(known)) if known else 0.0
    kept = [unpack_rows(record[ROWS]) for record in points] if all(ROWS in record for record in points) else []
    if len({len(losses) for losses, _ in kept}) > 1:
        raise ConfigError(f"{called}: its runs were evaluated on different numbers of held-out rows")
    targets = {record[TARGETS] for record in points if TARGETS in record}
    if len(targets) > 1:
        raise ConfigError(f"{called}: its runs were evaluated on different held-out rows")

    def column(name: str) -> Floats:
        return np.array([float(record[name]) for record in points])

    return Arm(
        tuple(str(record["run"]) for record in points), column("params"), column("flops"), column("loss"),
        column("loss_stderr"), np.array([_of_run(lost, record, usual) for record in points]),
        np.array([seconds.get(str(record["run"]), math.nan) for record in points]), column("seed"),
        np.stack([losses for losses, _ in kept]) if kept else None, kept[0][1] if kept else None, _edges(finals),
        next(iter(targets), None),
    )  # fmt: skip


def pack_rows(losses: Floats, weights: Floats) -> str:
    """Losses and weights of held-out rows [J] as text: losses in float16 (an error of 0.05 % of one row's loss)."""
    packed = np.asarray(losses, "<f2").tobytes() + np.asarray(weights, "<f4").tobytes()
    return base64.b64encode(zlib.compress(packed, 6)).decode()


def unpack_rows(text: str) -> tuple[Floats, Floats]:
    """Losses and weights [J] of `pack_rows`' text, float64.

    Raises:
      ConfigError: the text is damaged.
    """
    try:
        unzip = zlib.decompressobj()
        packed = unzip.decompress(base64.b64decode(text, validate=True), 6 * _MOST_ROWS)
        if len(packed) % 6 or not unzip.eof:
            raise ValueError
    except (ValueError, binascii.Error, zlib.error):
        raise ConfigError(f"records: {ROWS}: {text[:20]!r}... does not hold the losses of held-out rows") from None
    count = len(packed) // 6
    losses = np.frombuffer(packed[: 2 * count], "<f2").astype(np.float64)
    return losses, np.frombuffer(packed[2 * count :], "<f4").astype(np.float64)


def _tried(finals: Sequence[Record]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """(width, tokens) -> the rates tried there, ascending, with their losses (infinite if diverged), of one seed."""
    first: dict[int, int] = {}
    for record in finals:
        first[record["width"]] = min(record["seed"], first.get(record["width"], record["seed"]))
    out: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for record in finals:
        if record["seed"] == first[record["width"]]:
            loss = float(record["loss"])
            pair = (float(record["learning_rate"]), loss if math.isfinite(loss) else math.inf)
            out.setdefault((record["width"], record["tokens"]), []).append(pair)
    return {key: sorted(pairs) for key, pairs in out.items() if len(pairs) > 1}


def _excesses(finals: Sequence[Record]) -> dict[tuple[int, int, float], float]:
    """(width, tokens, best rate) -> how much lower log loss is at the vertex of a parabola through the best rate and
    its neighbours; nan without neighbours on both sides."""
    out = {}
    for (width, tokens), pairs in _tried(finals).items():
        best = min(range(len(pairs)), key=lambda i: pairs[i][1])
        out[width, tokens, pairs[best][0]] = math.nan
        if 0 < best < len(pairs) - 1 and all(math.isfinite(loss) for _, loss in pairs[best - 1 : best + 2]):
            x, y = np.log(pairs[best - 1 : best + 2]).T
            c0, c1, c2 = np.polynomial.polynomial.polyfit(x - x[1], y - y[1], 2)
            out[width, tokens, pairs[best][0]] = float(np.clip(-c0 + c1**2 / (4 * c2), 0.0, _MOST_EXCESS))
    return out


def _of_run(lost: Mapping[tuple[int, int, float], float], record: Record, usual: float) -> float:
    """The excess of a run: of its size and rate, at the tokens nearest to its own; else `usual`."""
    mine = [
        (abs(math.log(tokens / record["tokens"])), excess)
        for (width, tokens, rate), excess in lost.items()
        if width == record["width"] and rate == record["learning_rate"] and math.isfinite(excess)
    ]
    return min(mine)[1] if mine else usual


def _edges(finals: Sequence[Record]) -> tuple[str, ...]:
    """A line for each size whose best rate, at the most tokens where rates were tried, is the lowest or highest."""
    out = {}
    for (width, tokens), pairs in sorted(_tried(finals).items()):
        best = min(range(len(pairs)), key=lambda i: pairs[i][1])
        out[width] = ""
        if best in (0, len(pairs) - 1):
            end = "lowest" if best == 0 else "highest"
            out[width] = f"width {width}: the best rate, {pairs[best][0]:g} at {tokens} tokens, is the {end} tried"
    return tuple(line for line in out.values() if line)


def _seconds(finals: Sequence[Record]) -> dict[str, float]:
    """Run -> seconds of a whole run. A run's own are those of the updates since the branch before on its trunk."""
    trunks: dict[str, list[Record]] = {}
    for record in finals:
        if "seconds" in record and "step" in record and "branched_at" in record:
            trunks.setdefault(str(record.get("trunk", record["run"])), []).append(record)
    out = {}
    for mine in trunks.values():
        before = 0
        for record in sorted(mine, key=lambda record: record["branched_at"]):
            made = record["step"] - before
            if made > 0 and record["seconds"] > 0:
                out[str(record["run"])] = float(record["seconds"]) / made * record["step"]
            before = record["branched_at"]
    return out
