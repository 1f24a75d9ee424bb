"""Label the examples of files with a run that learned a task.

    jaxformer predict runs/tune_exception_type --files=new.jsonl

The files have the fields that the run's own text had; labels in them are not read. What is printed is one JSON
object for each example, in order.
"""

import json

from jaxformer.config.fields import from_text
from jaxformer.runs.command_line import add_workdir, parser


def main() -> None:
    """Prints a JSON object for each example."""
    arguments = parser(__doc__, "predict")
    add_workdir(arguments)
    arguments.add_argument("--files", required=True, metavar="GLOB,...", help=".jsonl, .csv, .tsv or SQuAD's .json")
    options = arguments.parse_args()
    from jaxformer.runs.prediction import predict

    for line in predict(options.workdir, from_text(options.files, tuple[str, ...], "--files"), mesh=options.mesh):
        print(json.dumps(line, ensure_ascii=False))
