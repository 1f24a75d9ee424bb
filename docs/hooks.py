"""What mkdocs needs beyond the pages here: files of the repository that are pages or figures, and generated pages.

Pages link to files of the repository as they are seen from docs/, so that the links work in a checkout too.
"""

import base64
import importlib
import inspect
import json
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {  # file of the repository -> page of the site
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "launch/README.md": "launch.md",
}
RESULTS = "experiments/results"
SHOWN = {".md", ".png", ".svg", ".html"}
# Names of jaxformer/__init__.py -> heading, by the module that defines them.
GROUPS = {
    "jaxformer.functional": "Functions",
    "jaxformer.masks": "Masks",
    "jaxformer.patterns": "Patterns of masks",
    "jaxformer.models": "Models",
    "jaxformer.config": "Config",
    "jaxformer.specs": "Parameters",
    "jaxformer.types": "Types",
    "jaxformer.errors": "Errors",
}


def on_files(files, config):
    """Adds the pages that are made from files elsewhere, and from the package itself."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for path in sorted((ROOT / RESULTS).rglob("*")):
        if path.suffix in SHOWN and path.name != "notes.md":  # which the page beside it includes
            page = f"results/{path.relative_to(ROOT / RESULTS).as_posix()}"
            files.append(File.generated(config, page, abs_src_path=str(path)))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        content, figures = notebook_page(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=content))
        for name, figure in figures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=figure))
    files.append(File.generated(config, "api/fields.md", content=fields_page()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links from a page here to files of the repository become links to the pages that they are in the site."""
    if page.file.generated_by is not None:  # GitHub lets a list go on at two spaces, Python-Markdown at four
        markdown = re.sub(r"^  (?=\S)", "    ", markdown, flags=re.MULTILINE)
        markdown = re.sub(r"^(    .*)\n(?=- )", r"\1\n\n", markdown, flags=re.MULTILINE)
        markdown = markdown.replace("](docs/", "](")  # as seen from the root of the repository
        markdown = markdown.replace(f"]({RESULTS}", "](results")
    if page.file.src_uri == "api/jaxformer.md":
        markdown = markdown.replace("<!-- names -->", front_door())
    for source, name in {**PAGES, RESULTS: "results"}.items():
        markdown = re.sub(rf"\]\((?:\.\./)+{re.escape(source)}", f"]({name}", markdown)
    return markdown


def on_page_content(html, page, config, files):
    """The search finds what pages say, not the source code that they show; formulas outside code are set."""
    shown = '<details class="mkdocstrings-source"'
    html = html.replace(shown, f"{shown} data-search-exclude")
    parts = re.split(r"(<(pre|code|h\d|a)\b.*?</\2>|<[^>]+>)", html, flags=re.DOTALL)
    parts[::3] = map(formulas, parts[::3])  # the text; then what is kept, and the name of its tag
    return "".join(part for number, part in enumerate(parts) if number % 3 != 2)


def formulas(text):
    """Powers and indices as HTML.

    >>> formulas("N ~ C^0.48, 2^(n - 1) and N_c^alpha_N; but gpt_tiny")
    'N ~ C<sup>0.48</sup>, 2<sup>n - 1</sup> and N<sub>c</sub><sup>alpha<sub>N</sub></sup>; but gpt_tiny'
    """
    power = r"(?<=[\w)\]])\^(?:\(([^()]*)\)|(-?\w+(?:[./]\d+)?))"
    text = re.sub(power, lambda found: f"<sup>{found[1] or found[2]}</sup>", text)
    return re.sub(r"(?<!\w)([^\W\d_]|alpha|sum)_(\w)(?!\w)", r"\1<sub>\2</sub>", text)


def front_door():
    """Every name of `import jaxformer` with its first line, linked to where it is documented."""
    package = importlib.import_module("jaxformer")
    rows = {heading: [] for heading in GROUPS.values()}
    for name in sorted(package.__all__, key=str.lower):
        value = getattr(package, name)
        module = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "jaxformer.types")
        if name in ("Array", "Params"):  # aliases
            module = "jaxformer.types"
        group = next(GROUPS[start] for start in GROUPS if module.startswith(start))
        about = {"Array": "A JAX array.", "Params": "Parameters: a nested dict of arrays."}.get(name)
        about = about or inspect.cleandoc(value.__doc__).split("\n\n")[0].replace("\n", " ")
        shown = f"[`{name}`][{module}.{name}]"
        if inspect.ismodule(value):
            page = f"{name}.md" if name in ("masks", "patterns") else "models.md#file-" + name.replace("_", "-")
            shown = f"[`{name}`]({page})"
        elif name in ("Array", "Params"):
            shown = f"`{name}`"
        rows[group].append(f"{shown}\n:   {about}\n")
    return "\n".join(f"## {heading}\n\n" + "\n".join(found) for heading, found in rows.items() if found)


def notebook_page(path):
    """(Markdown, {name: PNG}) of a notebook with its outputs."""
    notebook, parts, figures = json.loads(path.read_text(encoding="utf-8")), [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        language = "sh" if source.startswith("%%sh") else "python"
        parts.append(f"```{language}\n{source.removeprefix('%%sh').strip()}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{path.stem}-{len(figures)}.png"
                figures[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![What the code above draws]({name})")
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    title, *rest = parts
    where = f"This page is a notebook: [docs/notebooks/{path.name}]({path.name})."
    heading, _, text = title.partition("\n\n")
    return "\n\n".join([heading, where, text, *rest]) + "\n", figures


def fields_page():
    """Every field of a config, as `jaxformer pretrain --help` and `jaxformer scaling --help` tell them."""
    from jaxformer.config.reference import reference
    from jaxformer.scaling.ladder import StudyConfig

    lines = [
        "# All config fields",
        "",
        "Every field with its default, what it accepts and what it means, generated from the docstrings of",
        "`jaxformer/config/` (and `jaxformer/scaling/ladder.py`, whose section `ladder` only scaling studies have).",
        "On a command line a field is set as it is written here. A name in brackets says which `kind` has the field.",
        "",
    ]
    sections = {"": []}
    for field in reference(StudyConfig):
        sections.setdefault(field.path.rpartition(".")[0], []).append(field)
    for section, fields in sections.items():
        lines += [f"## {section or 'The run itself'}", ""]
        for field in fields:
            accepted = field.accepted.replace("|", "\\|")
            meaning = re.sub(r"(`[^`]*`)|([*_<])", lambda each: each[1] or f"\\{each[2]}", field.meaning)
            lines += [f"`--config.{field.path}={field.default}`", f":   {meaning} *Accepted: {accepted}.*", ""]
    return "\n".join(lines)
