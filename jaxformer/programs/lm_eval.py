"""Evaluate a run on tasks of lm-eval, EleutherAI's evaluation harness, with examples before each question.

    jaxformer lm-eval runs/gpt2 --tasks=lambada_openai,arc_easy
    jaxformer lm-eval runs/gpt2 --tasks=my_task --include-path=tasks --num-fewshot=5

It needs the extra lm_eval. RUN may be one that `jaxformer import` made. Tasks that come with lm-eval fetch their data
from the Hugging Face Hub; --include-path names a folder of your own, with tasks as YAML files whose data may lie beside
them. The results are printed as lm-eval prints them and written to lm_eval/ in the run.
"""

import json

from jaxformer.config.fields import from_text
from jaxformer.errors import ConfigError
from jaxformer.runs.command_line import add_workdir, integer, parser, path_text


def main() -> None:
    """Prints lm-eval's table; with --json its results as one JSON object."""
    arguments = parser(__doc__, "lm-eval")
    add_workdir(arguments)
    arguments.add_argument("--tasks", required=True, metavar="NAME,...", help="tasks, groups or tags, or arc_*")
    arguments.add_argument("--num-fewshot", type=integer(0), metavar="N", help="examples before each question")
    arguments.add_argument("--include-path", type=path_text, metavar="DIR", help="a folder with tasks as YAML files")
    arguments.add_argument("--limit", type=integer(1), metavar="N", help="only the first N examples of each task")
    arguments.add_argument(
        "--batch-size", type=integer(1), default=8, metavar="N",
        help="rows as long as the context at once; of shorter ones as many more (8)",
    )  # fmt: skip
    arguments.add_argument(
        "--gen-kwargs", metavar="NAME=VALUE,...", help="over the task's generation_kwargs, as max_gen_toks=32"
    )
    arguments.add_argument(
        "--seed", type=integer(0, 2**31 - 1), default=1234, help="of the choice of examples, and of sampling (1234)"
    )
    arguments.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    options = arguments.parse_args()
    tasks = from_text(options.tasks, tuple[str, ...], "--tasks")
    if not all(tasks) or not tasks:
        raise ConfigError(f"--tasks: {options.tasks!r}; accepted: names with commas between them")
    generation = settings(options.gen_kwargs)

    from jaxformer.runs import few_shot

    asked = few_shot.FewShot(
        tasks, options.num_fewshot, options.include_path, options.limit, generation, options.seed
    )  # fmt: skip
    found = few_shot.run_tasks(
        options.workdir, asked, mesh=options.mesh, batch_size=options.batch_size,
        log=(lambda line: None) if options.json else print,
    )  # fmt: skip
    if options.json:
        print(few_shot.as_text(found))


def settings(text: str | None) -> dict[str, object] | None:
    """`a=1,b=true` as a mapping; values are read as JSON where they are some. Raises ConfigError: a part has no "="."""
    found: dict[str, object] = {}
    for part in text.split(",") if text is not None else ():
        name, equals, value = part.partition("=")
        if not name or not equals:
            raise ConfigError(f"--gen-kwargs: {part!r}; accepted: NAME=VALUE, as max_gen_toks=32")
        try:
            found[name.strip()] = json.loads(value)
        except ValueError:
            found[name.strip()] = value
    return found or None
