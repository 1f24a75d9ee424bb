"""What the ladders of a comparison that have finished are worth: a page, from the records in a folder for each.

    python -m experiments.multipliers compare_ablations --out=experiments/results/ablations

`jaxformer compare compare_ablations --config.workdir=experiments/results/ablations --only=NAME` trains one more; the
manifest and records.jsonl of a ladder are all that is kept of it, and all that this program and that command need.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import loss_by_place_page, stretches
from experiments.transfer_runs import write
from jaxformer import records
from jaxformer.config import load
from jaxformer.errors import ConfigError
from jaxformer.runs.command_line import file_path, parser
from jaxformer.runs.comparing import BASELINE, OF_PAIRS, RECORDS
from jaxformer.runtime.program import program
from jaxformer.scaling import multiplier_page, plotting
from jaxformer.scaling.compare import Multiplier, compare
from jaxformer.scaling.comparison_table import value_text

# What others have found for a change, where they have compared it; the page says whether these runs agree.
LITERATURE = {
    "post_norm": "needs warm-up, and trains worse where deep (Xiong et al. 2020)",
    "parallel_block": "as good from some size on, faster on accelerators (Wang 2021; Chowdhery et al. 2022)",
    "layer_norm": "as good as RMS norm, which is cheaper (Zhang and Sennrich 2019; Narang et al. 2021)",
    "qk_norm": "allows larger rates, else little (Henry et al. 2020; Wortsman et al. 2024)",
    "learned_positions": "worse than relative ones in most comparisons (Shaw et al. 2018; Press et al. 2022)",
    "rotary": "as good as T5's biases, or better (Su et al. 2021; Black et al. 2022)",
    "alibi": "about as good at the length of training (Press et al. 2022)",
    "swiglu": "better at equal parameters and work (Shazeer 2020; Narang et al. 2021)",
    "untied": "little where the table is a small part (Press and Wolf 2017; Narang et al. 2021)",
    "four_layers": "shape matters little within a wide range (Kaplan et al. 2020, section 3)",
    "window_of_32": "loses what lies farther away (Beltagy et al. 2020)",
    "lion": "as good as AdamW or better (Chen et al. 2023), not told apart when tuned (Kaddour et al. 2023)",
    "muon": "1.3 to 2 times AdamW's compute (Jordan et al. 2024; Liu et al. 2025), less when tuned (Wen et al. 2025)",
    "batch_of_8": "costs little below the critical batch (McCandlish et al. 2018)",
    "cosine": "as good as a decay at the end (Hu et al. 2024; Hägele et al. 2024)",
    "window": "loses what lies farther away (Beltagy et al. 2020)",
    "dilated": "helps a little in some heads of upper layers (Beltagy et al. 2020)",
    "strided": "as good as dense on long rows (Child et al. 2019)",
    "fixed": "as good as dense on text, better than strided there (Child et al. 2019)",
    "longformer": "as good as dense on long rows (Beltagy et al. 2020)",
    "bigbird": "as good as dense in encoders of long rows (Zaheer et al. 2020)",
    "lsh": "close to dense with 8 rounds of hashing, worse with fewer (Kitaev et al. 2020)",
    "linear": "worse than softmax on text (Schlag et al. 2021), close to it on images (Katharopoulos et al. 2020)",
    "performer": "close to softmax on proteins (Choromanski et al. 2021), worse on text (Schlag et al. 2021)",
    "lstm": "as good on early tokens of a row, worse on later ones (Kaplan et al. 2020, section 3.2)",
    "gru": "about as good as the LSTM (Chung et al. 2014; Jozefowicz et al. 2015)",
    "sinusoidal": "worse than relative positions (Shaw et al. 2018; Press et al. 2022)",
    "transformer_xl": "better where texts are long (Dai et al. 2019)",
    "experts": "2 to 7 times less compute, less so as models grow (Fedus et al. 2022; Clark et al. 2022)",
    "encoder_decoder": "better than a decoder alone on tasks (Raffel et al. 2020), worse on text (Wang et al. 2022)",
    "bahdanau": "worse than attention alone in translation (Vaswani et al. 2017)",
    "one_layer_each": "few layers of a decoder are enough for translation (Kasai et al. 2021)",
}
STRETCHES = "python -m experiments.stretches --files='books/train-0[0-4].txt.xz' \\\n    " + (
    "--validation=books/validation.txt.xz --out=pairs"
)


def finished(out: Path, variants: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Name -> records of the ladders that are there, the baseline's first.

    Raises:
      ConfigError: the baseline's are not.
    """
    paths = {name: out / name / RECORDS for name in (BASELINE, *variants)}
    if not paths[BASELINE].exists():
        raise ConfigError(f"--out: {out} has no {BASELINE}/{RECORDS}; accepted: the folder of a comparison")
    return {name: records.load(path, more=records.STUDY) for name, path in paths.items() if path.exists()}


def manifest(out: Path) -> dict[str, Any]:
    """That of the baseline's ladder."""
    return json.loads((out / BASELINE / "manifest.json").read_text(encoding="utf-8"))


def worth(found: dict[str, list[dict[str, Any]]], replicates: int = 1000) -> dict[str, Multiplier]:
    """Name -> multiplier of each variant."""
    baseline = found[BASELINE]
    return {name: compare(baseline, mine, replicates=replicates) for name, mine in found.items() if name != BASELINE}


def beyond(
    records_of: dict[str, list[dict[str, Any]]], variants: dict[str, Any], replicates: int = 1000
) -> dict[tuple[str, str], Multiplier]:
    """(variant, another) -> what the first is worth against the second, all of whose changes it has and more."""
    pairs = [(one, other) for one in records_of for other in records_of if BASELINE not in (one, other)]
    more = [(one, other) for one, other in pairs if variants[one].items() > variants[other].items()]
    return {pair: compare(records_of[pair[1]], records_of[pair[0]], replicates=replicates) for pair in more}


def _beyond(found: Mapping[tuple[str, str], Multiplier]) -> list[str]:
    """Lines of the page."""
    if not found:
        return []
    said = [f"- `{one}` against `{other}`: {of.flop}, {of.verdict}" for (one, other), of in found.items()]
    return ["Beside a variant that they extend, by which M is what their other changes are worth:", "", *said, ""]


def page(
    name: str,
    variants: dict[str, Any],
    out: str,
    found: dict[str, Multiplier],
    baseline: Mapping[str, Any],
    against: Mapping[tuple[str, str], Multiplier],
    more: Sequence[str] = (),
) -> str:
    """README.md of the folder; `baseline`: the manifest of its ladder, `against`: of `beyond`, `more`: lines about runs
    of one size."""
    cited = any(each in LITERATURE for each in found)
    head = ["variant", "multiplier M", "verdict", "M per tenfold compute", "in parameters", "what changes"]
    rows = [head + ["others found"] * cited, ["---"] * (len(head) + cited)]
    for each, of in found.items():
        told = {field: value for field, value in variants[each].items() if field not in OF_PAIRS[1:]}
        changes = ", ".join(f"`{field}={value_text(value)}`" for field, value in told.items())
        cells = [f"`{each}`", str(of.flop), of.verdict, str(of.trend), str(of.parameters), changes]
        rows.append(cells + [LITERATURE.get(each, "")] * cited)
    first = next(iter(found.values()))
    left = [each for each in variants if each not in found]
    notes = [f"- `{each}`: {note}" for each, of in found.items() for note in of.notes]
    return "\n".join([
        f"# {out}: what each change is worth in compute",
        "",
        "M is how many times the baseline's compute buys the variant's loss, at the largest budget where both have a "
        f"best size between others ({first.at:.3g} FLOP for the first row); above 1 the variant saves. Intervals are "
        "of 95 % and include seeds, held-out rows, learning rates and the law's misfit, as `docs/compare.md` says.",
        "",
        *_same(variants, found),
        "![multipliers with their intervals](forest.svg)",
        "",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        *_beyond(against),
        *(["Noted of these runs:", "", *notes, ""] if notes else []),
        *([f"Still to be trained: {', '.join(f'`{each}`' for each in left)}.", ""] if left else []),
        *more,
        "## How",
        "",
        *_command(baseline, name, out),
        "",
        f"{_text(baseline['config'], variants)} Ladders are "
        "trained one by one, on cores that other programs shared, so measured seconds are left out here. What it does "
        "not show: larger models, other text, changes together.",
        "",
    ])  # fmt: skip


def _same(variants: dict[str, Any], found: dict[str, Multiplier]) -> list[str]:
    """What ladders say that differ in nothing but their seeds."""
    same = [of for each, of in found.items() if variants[each].keys() == {"seed"}]
    if not same:
        return []
    held = [sum(each.low <= 1 <= each.high for each in of) for of in ([m.flop for m in same], [m.trend for m in same])]
    return [
        f"**Nothing changes but the seeds, so M and its trend are 1: of {len(same)} intervals of 95 %, "
        f"{held[0]} hold M and {held[1]} its trend.**",
        "",
    ]


def _text(config: Mapping[str, Any], variants: Mapping[str, Any]) -> str:
    data, whole = config["data"], "The baseline is the config as it is;"
    if data["source"] == "stdlib":
        return f"{whole} the text is Python's own standard library, some of its files held out."
    if data["objective"] != "instructions":
        return f"{whole} `books/` holds 200 MB of novels, whole books held out."
    form = next(iter(variants.values()))
    sizes = [f"{low} to {high}" for low, high in zip(stretches.ALONE, stretches.MOST, strict=True)]
    return (
        f"The baseline, the config as it is, is a GPT of {config['ladder']['min_layers']} layers that reads a pair as "
        f"one row of {config['model']['context_length']} tokens. The others have a source of "
        f"{form['model.encoder.source_length']} and a target of {form['model.context_length']}, and as many layers on "
        "each side as it, or `ladder.min_layers`. No loss is taken on the source; a GPT that learns from sources too "
        f"is what `objectives` compares. A pair is a stretch of a novel ({sizes[0]} tokens) and what follows it "
        f"({sizes[1]}); whole books are held out."
    )


def _command(baseline: Mapping[str, Any], name: str, out: str) -> list[str]:
    """The lines that train one ladder and make the page."""
    flags = [flag for flag in baseline["command"][2:] if not flag.startswith(("--only", "--config.workdir"))]
    quoted = [re.sub(r"=(.*[*\\].*)", r"='\1'", flag) for flag in flags]
    lines = [f"jaxformer compare {name}", *quoted, f"--config.workdir=experiments/results/{out}", "--only=NAME"]
    text = lines[0]
    for line in lines[1:]:
        text += (" " if len(text.splitlines()[-1] + line) < 98 else " \\\n    ") + line
    if baseline["config"]["data"]["objective"] == "instructions":
        text = f"{STRETCHES}\n{text}"
    text += f"\npython -m experiments.multipliers {name} --out=experiments/results/{out}"
    return [f"    {line}" for line in text.splitlines()]


def main() -> None:
    """Writes README.md and forest.svg."""
    arguments = parser(__doc__, "multipliers")
    arguments.add_argument("config", help="of the comparison, as compare_ablations")
    arguments.add_argument(
        "--out", type=file_path, required=True, metavar="DIR", help="folder with one for each ladder"
    )
    options = arguments.parse_args()
    variants = load(options.config)["variants"]
    ladders = finished(options.out, variants)
    found, against = worth(ladders), beyond(ladders, variants)
    if not found:
        raise ConfigError(f"--out: {options.out} has no variant that finished; accepted: the baseline and one more")
    drawn = plotting.encoded(multiplier_page.draw(found)["forest"], "svg", bbox_inches="tight")
    more = loss_by_place_page.section(options.out)
    text = page(options.config, variants, options.out.name, found, manifest(options.out), against, more)
    for path in write(options.out, {"forest": drawn} | loss_by_place_page.draw(options.out), text):
        print(path)


if __name__ == "__main__":
    program(main)
