"""The ladder of a scaling study: which runs its sizes, budgets, learning rates and seeds require.

A size is given by its width; depth and heads follow by fixed ratios, the feed-forward width from the model config. A
run is a size trained for some tokens at a learning rate from a seed. With the warmup-stable-decay schedule the runs of
one size, rate and seed branch off one trunk, so that many budgets cost little more than the largest.

At each size several learning rates, factors of a starting value, are tried up to a middle budget. Each budget up to
there uses its own best rate, because shorter runs need higher ones; the larger budgets use the middle one's best, whose
trunk exists already. If the best is the lowest or highest tried, another is tried. The largest sizes, where the search
costs most, can use the factor of the next smaller size (`searched_sizes`).

>>> from jaxformer.config import from_mapping
>>> study = from_mapping({"model": {"vocab_size": 512, "context_length": 128},
...                       "optimizer": {"schedule": "wsd", "warmup_steps": 20},
...                       "ladder": {"widths": [64, 128], "budgets": [5e12, 2e13]}}, cls=StudyConfig)
>>> [(run.width, run.steps, run.learning_rate) for run in runs(study, {})][:3]
[(64, 2484, 0.0005), (64, 9934, 0.0005), (64, 2484, 0.001)]
>>> [(cell.width, cell.steps, cell.budget) for cell in cells(study)]
[(64, 2484, 5000000000000.0), (64, 9934, 20000000000000.0), (128, 1656, 20000000000000.0)]
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, NamedTuple

from jaxformer.config import Config, ModelConfig
from jaxformer.config.fields import Section
from jaxformer.errors import ConfigError
from jaxformer.models.flops import count_parameters, training_flops


@dataclass(frozen=True)
class LadderConfig(Section, name="ladder", most={"widths": 2**24, "tokens": 2**62}):
    """Sizes, budgets, learning rates and seeds of a study.

    Attributes:
      widths: the sizes.
      head_width: heads = width / head_width.
      layer_width: layers = width / layer_width, rounded, at least min_layers.
      min_layers: fewest layers of a size.
      budgets: training FLOP; each trains all sizes that the next three fields allow (iso-FLOP curves).
      tokens: training tokens; every size is trained for each of them (curves of fixed D or N).
      min_tokens_per_parameter: a budget skips sizes that it trains for fewer tokens per parameter.
      max_tokens_per_parameter: or for more.
      min_steps: or for fewer steps.
      learning_rates: factors of each size's starting value to try.
      learning_rate_exponent: the starting value is optimizer.learning_rate * (widths[0] / width) ** this.
      learning_rate_extensions: how often to try another factor if the best is the lowest or highest.
      searched_sizes: how many sizes, smallest first, search their rate; larger ones use the last factor; None: all.
      seeds: number of seeds at the chosen rate, for error bars.
      seeded_sizes: number of sizes, smallest first, with all seeds; the others have one.
      max_epochs: runs that would read their text more often are refused.
    """

    widths: tuple[int, ...] = (64, 96, 128, 192, 256)
    head_width: int = 32
    layer_width: int = 32
    min_layers: int = 2
    budgets: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    min_tokens_per_parameter: float = 2.0
    max_tokens_per_parameter: float = 400.0
    min_steps: int = 100
    learning_rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    learning_rate_exponent: float = 0.5
    learning_rate_extensions: int = 2
    searched_sizes: int | None = None
    seeds: int = 1
    seeded_sizes: int = 2
    max_epochs: float = 1.0
    SHAPE: ClassVar = ("head_width", "layer_width", "min_layers")  # the fields that define the model of a width

    def _check(self):
        ones = ("head_width", "layer_width", "min_layers", "min_steps", "seeds", "searched_sizes")
        zeros = ("learning_rate_extensions", "seeded_sizes", "min_tokens_per_parameter", "learning_rate_exponent")
        for name in (*ones, *zeros):
            value, low = getattr(self, name), int(name in ones)
            if value is not None and not low <= value < math.inf:
                raise ConfigError(f"config.ladder.{name}: {value}; accepted: at least {low}")
        for name in ("widths", "learning_rates"):
            if not getattr(self, name):
                raise ConfigError(f"config.ladder.{name}: () is empty; accepted: at least one")
        for name in ("widths", "budgets", "tokens", "learning_rates"):
            values = getattr(self, name)
            if list(values) != sorted(set(values)) or any(not 0 < value < math.inf for value in values):
                raise ConfigError(f"config.ladder.{name}: {values}; accepted: numbers above 0, ascending")
        if not self.budgets and not self.tokens:
            raise ConfigError("config.ladder.budgets: () is empty, and so is ladder.tokens; one of them is needed")
        if self.max_tokens_per_parameter <= self.min_tokens_per_parameter:
            raise ConfigError(
                f"config.ladder.max_tokens_per_parameter: {self.max_tokens_per_parameter}; accepted: more than "
                f"ladder.min_tokens_per_parameter {self.min_tokens_per_parameter}"
            )
        if not self.max_epochs > 0:
            raise ConfigError(f"config.ladder.max_epochs: {self.max_epochs}; accepted: a number above 0")
        for width in self.widths:
            if width % self.head_width:
                raise ConfigError(
                    f"config.ladder.head_width: {self.head_width} does not divide the width {width} of ladder.widths"
                )


@dataclass(frozen=True)
class StudyConfig(Config):
    """The config that every run of the study is derived from, and the ladder.

    Attributes:
      ladder: the sizes, budgets and learning rates of the study.
    """

    ladder: LadderConfig = field(default_factory=lambda: LadderConfig(tokens=(1_000_000,)))


class Cell(NamedTuple):
    """A size trained for some tokens.

    Attributes:
      width: the size.
      steps: updates.
      tokens: training tokens in these steps.
      flops: exact training FLOP.
      budget: the budget it belongs to; None if it comes from `tokens`.
    """

    width: int
    steps: int
    tokens: int
    flops: float
    budget: float | None


class LadderRun(NamedTuple):
    """A run that the ladder requires.

    Attributes:
      name: unique in the study; contains the next four.
      width, steps, learning_rate, seed: what to train.
      role: "ladder" for a point of the fits, "learning rate" for a rate that was tried and not chosen (so far).
    """

    name: str
    width: int
    steps: int
    learning_rate: float
    seed: int
    role: str


def size_model(model: ModelConfig, width: int, ladder: LadderConfig) -> ModelConfig:
    """The model of a size: `model` with this width, and layers and heads by the ladder's ratios."""
    return replace(
        model,
        width=width,
        num_layers=max(ladder.min_layers, round(width / ladder.layer_width)),
        attention=model.attention.sized(width, ladder.head_width),
        feed_forward=model.feed_forward.sized(),
        encoder=None if model.encoder is None else model.encoder.sized(),
        funnel=None if model.funnel is None else model.funnel.sized(),
    )


def cells(study: StudyConfig, available: int | None = None) -> list[Cell]:
    """The grid of sizes and steps without duplicates, ordered by width, then steps.

    Args:
      study: with model.vocab_size filled in.
      available: training tokens in one epoch; None: not checked.

    Raises:
      ConfigError: a run would read its text more often than ladder.max_epochs, or a budget trains no size.
    """
    ladder, batch = study.ladder, study.train.global_batch_size * study.model.context_length
    out: list[Cell] = []
    used: set[float] = set()
    for width in ladder.widths:
        model = size_model(study.model, width, ladder)
        price, size = training_flops(model, study.data), count_parameters(model).total
        mine: dict[int, Cell] = {}
        for tokens in ladder.tokens:
            steps = max(1, round(tokens / batch))
            mine[steps] = Cell(width, steps, steps * batch, steps * batch * price, None)
        for budget in ladder.budgets:
            steps = round(budget / price / batch)
            low, high = ladder.min_tokens_per_parameter, ladder.max_tokens_per_parameter
            if steps >= ladder.min_steps and low <= steps * batch / size <= high:
                used.add(budget)
                mine[steps] = Cell(width, steps, steps * batch, steps * batch * price, budget)
        out += [mine[steps] for steps in sorted(mine)]
    if unused := [budget for budget in ladder.budgets if budget not in used]:
        raise ConfigError(
            f"config.ladder.budgets: {unused[0]:g} FLOP trains none of ladder.widths for at least {ladder.min_steps} "
            f"steps and {ladder.min_tokens_per_parameter:g} to {ladder.max_tokens_per_parameter:g} tokens per parameter"
        )
    for cell in out:
        if available is not None and cell.tokens > ladder.max_epochs * available:
            name = "tokens" if cell.budget is None else f"budgets: {cell.budget:g} FLOP"
            raise ConfigError(
                f"config.ladder.{name}: width {cell.width} needs {cell.tokens} tokens, "
                f"{cell.tokens / available:.2f} epochs of the corpus's {available}; accepted: up to "
                f"ladder.max_epochs {ladder.max_epochs:g}"
            )
    return out


def runs(study: StudyConfig, losses: Mapping[str, float], available: int | None = None) -> list[LadderRun]:
    """All runs known to be required, given the losses of finished ones; call it again when there are more losses.

    Args:
      study: with model.vocab_size filled in.
      losses: name of a finished run -> its validation loss; not finite if it diverged.
      available: as in `cells`.

    Raises:
      ConfigError: as `cells`.
    """
    ladder = study.ladder
    grid = cells(study, available)
    out: list[LadderRun] = []
    chosen = before = None
    for place, width in enumerate(ladder.widths):
        mine = [cell for cell in grid if cell.width == width]
        if not mine:
            continue
        middle = len(mine) // 2
        if before is None or ladder.searched_sizes is None or place < ladder.searched_sizes:
            tried, chosen = _rates(study, width, mine[middle].steps, losses)
        else:  # the factor of the previous size, once it is known
            chosen = chosen and _rounded(chosen / starting_rate(study, before) * starting_rate(study, width))
            tried = [] if chosen is None else [chosen]
        before = width
        best = {cell: chosen if cell in mine[middle:] else _best(study, cell, tried, losses) for cell in mine}
        for rate in tried:
            # All budgets up to the middle one at once, because they branch off the same trunk in passing.
            for cell in mine[: middle + 1]:
                name = run_name(width, cell.steps, rate, study.seed)
                role = "ladder" if chosen is not None and rate == best[cell] else "learning rate"
                out.append(LadderRun(name, width, cell.steps, rate, study.seed, role))
        if chosen is None:
            continue
        for extra in range(ladder.seeds if place < ladder.seeded_sizes else 1):
            for cell in mine:
                rate = best[cell] or chosen
                name = run_name(width, cell.steps, rate, study.seed + extra)
                if all(run.name != name for run in out):
                    out.append(LadderRun(name, width, cell.steps, rate, study.seed + extra, "ladder"))
    return out


def planned(study: StudyConfig, losses: Mapping[str, float], available: int | None = None) -> list[LadderRun]:
    """All runs of the study, assuming that the starting learning rate is the best of those not yet tried."""
    losses = dict(losses)
    while True:
        found = runs(study, losses, available)
        unknown = [run for run in found if run.name not in losses]
        if not unknown:
            return found
        for run in unknown:
            losses[run.name] = 10.0 + abs(math.log(run.learning_rate / starting_rate(study, run.width)))


def starting_rate(study: StudyConfig, width: int) -> float:
    """The learning rate of factor 1 at a size."""
    ladder = study.ladder
    return study.optimizer.learning_rate * (ladder.widths[0] / width) ** ladder.learning_rate_exponent


def run_name(width: int, steps: int, learning_rate: float, seed: int) -> str:
    """The name of a run.

    >>> run_name(64, 300, 0.001, 0)
    'w64-n300-lr0.001-s0'
    """
    return f"w{width}-n{steps}-lr{learning_rate:g}-s{seed}"


def run_config(study: StudyConfig, run: LadderRun) -> Config:
    """The complete config of a run, with which it could also be trained alone."""
    changed = {
        "model": size_model(study.model, run.width, study.ladder),
        "optimizer": replace(study.optimizer, learning_rate=run.learning_rate),
        "train": replace(study.train, steps=run.steps),
        "seed": run.seed,
    }
    return Config(**{each.name: getattr(study, each.name) for each in fields(Config)} | changed)


def _rates(study: StudyConfig, width: int, steps: int, losses: Mapping[str, float]) -> tuple[list[float], float | None]:
    """Learning rates to try at a size, ascending, and the chosen one once all their losses are known."""
    ladder, start = study.ladder, starting_rate(study, width)
    factors = list(ladder.learning_rates)
    ratio = factors[1] / factors[0] if len(factors) > 1 else 1.0
    for _ in range(ladder.learning_rate_extensions + 1):
        rates = [_rounded(start * factor) for factor in factors]
        found = [losses.get(run_name(width, steps, rate, study.seed)) for rate in rates]
        if len(rates) == 1:
            return rates, rates[0]
        if None in found:
            return rates, None
        finite = [loss if loss is not None and math.isfinite(loss) else math.inf for loss in found]
        best = finite.index(min(finite))
        if best == 0:
            factors.insert(0, factors[0] / ratio)
        elif best == len(rates) - 1:
            factors.append(factors[-1] * ratio)
        else:
            return rates, rates[best]
    return rates, rates[best] if math.isfinite(finite[best]) else None


def _best(study: StudyConfig, cell: Cell, rates: Sequence[float], losses: Mapping[str, float]) -> float | None:
    """The rate of lowest finite loss at a cell; None if not all losses are known or none is finite."""
    found = [losses.get(run_name(cell.width, cell.steps, rate, study.seed)) for rate in rates]
    known = [loss for loss in found if loss is not None and math.isfinite(loss)]
    return None if None in found or not known else rates[found.index(min(known))]


def _rounded(rate: float) -> float:
    """Rounded as in the name of a run."""
    return float(f"{rate:.3g}")
