"""The house: who may import whom, how large a file may be, what `import jaxformer` may load, what is documented."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import jaxformer

ROOT = Path(jaxformer.__file__).resolve().parent.parent
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "jaxformer").rglob("*.py"))
PROGRAMS = sorted(
    path.relative_to(ROOT).as_posix() for name in ("configs", "experiments") for path in (ROOT / name).rglob("*.py")
)

# A file imports from lower floors, or from its own folder. A new file or folder needs a place here.
FLOORS = {
    "errors": 0, "types": 0, "patterns": 0,
    "specs": 1, "masks": 1, "low_rank": 1, "storage": 1, "runtime/host_memory": 1, "runtime/console": 1,
    "parallel": 2, "records": 2,
    "config": 3, "kernels": 3,
    "functional": 4, "runtime": 4, "parallel/mesh": 4,
    "models": 5, "data": 5,
    "modules": 6, "decoding": 6, "scaling": 6, "tracking": 6, "interchange": 6,
    "training": 7,
    "plan": 8, "runs": 9, "runtime/program": 8, "runtime/compilation_cache": 8,
    "benchmarks": 10, "programs": 11, "__main__": 12,
}  # fmt: skip

# More than the floors forbid: (room, rooms it does not see).
BANS = [
    ("training", {"data", "modules", "decoding"}),
    ("models", {"data"}),
    ("data", {"models", "parallel", "functional", "kernels"}),
    ("parallel", {"models", "data"}),
    ("scaling", {"training", "modules", "data"}),
    ("kernels", {"config", "records"}),
    ("functional", {"runs", "runtime", "storage", "records"}),
]
# package -> the only files that may import it, besides the benchmarks, which time it.
OWNERS = {
    "flax": {"jaxformer/modules.py"},
    "orbax": {"jaxformer/training/checkpoint/manager.py"},
    "tensorstore": {"jaxformer/training/checkpoint/ocdbt.py"},
    "ml_collections": set(),
    "torch": set(),
    "tensorflow": set(),
    "fsspec": {"jaxformer/storage/object_store.py"},  # inside functions: when the first address is met
    "tensorboardX": {"jaxformer/tracking/tensorboard.py"},
    "wandb": {"jaxformer/tracking/wandb.py"},
    "mlflow": {"jaxformer/tracking/mlflow.py"},
    "apache_beam": {"jaxformer/runs/tokenization.py"},
    "lm_eval": {"jaxformer/runs/harness.py", "jaxformer/runs/few_shot.py"},
    "safetensors": {"jaxformer/interchange/tensor_files.py"},
    "transformers": set(),
}
# What needs nothing but these two (and the standard library): all that `import jaxformer` reaches.
PURE_ROOMS = {
    "errors", "types", "specs", "low_rank", "patterns", "masks", "parallel", "records", "storage", "config", "kernels",
    "functional", "models",
}  # fmt: skip
PURE_PACKAGES = {"jax", "numpy"}

LINES = 320  # ceiling of a file
MORE_LINES = {
    "jaxformer/config/fields.py": 360,  # what a value of each type may be, as a value and as text
    "jaxformer/runs/manifest.py": 370,  # what a run's directory says, and whose it is
    "jaxformer/training/checkpoint/manager.py": 340,  # what is saved and what is read, by one library
}
CONFIG_LINES, PROGRAM_LINES = 70, 230
FORBIDDEN_NAMES = {"utils", "util", "common", "base", "helpers", "helper", "misc"}
NOT_LOADED = [
    "flax", "orbax", "tensorflow_datasets", "tensorflow", "matplotlib", "optax", "ml_collections", "grain",
    "tokenizers", "torch", "scipy", "pyarrow", "datasets", "tensorboardX", "wandb", "mlflow", "fsspec", "gcsfs", "s3fs",
    "safetensors", "lm_eval",
]  # fmt: skip


def room(file):
    """ "functional" of jaxformer/functional/block.py, "masks" of jaxformer/masks.py, "" of jaxformer/__init__.py."""
    parts = Path(file).with_suffix("").parts[1:]
    return "" if parts == ("__init__",) else parts[0]


@functools.cache
def parsed(file):
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


@functools.cache
def imports(file):
    """Dotted names of all modules a file imports, inside functions too; `from a import b` gives a and a.b."""
    found = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@functools.cache
def files_seen(file):
    """Files of jaxformer that a file imports; `from jaxformer import x` is no import of jaxformer/__init__.py."""
    found, names = set(), imports(file)
    for name in names:
        path = name.replace(".", "/")
        if f"{path}.py" in FILES:
            found.add(f"{path}.py")
        elif f"{path}/__init__.py" in FILES and any(
            other.rpartition(".")[0] == name and f"{other.replace('.', '/')}.py" not in FILES for other in names
        ):
            found.add(f"{path}/__init__.py")  # something that is defined there, not a module of that package
    return found - {file, "jaxformer/__init__.py"}


def rooms_seen(file):
    """Rooms of jaxformer that a file imports from."""
    return {room(each) for each in files_seen(file)}


def floor(file):
    return FLOORS.get(file.removeprefix("jaxformer/").removesuffix(".py"), FLOORS[room(file)])


def test_every_room_has_a_floor():
    assert {room(f) for f in FILES} - {""} <= FLOORS.keys()
    assert all((ROOT / "jaxformer" / name).is_dir() or f"jaxformer/{name}.py" in FILES for name in FLOORS)


@pytest.mark.parametrize("file", [f for f in FILES if room(f)])
def test_imports_go_down(file):
    for other in files_seen(file):
        below = floor(other) <= floor(file) if room(other) == room(file) else floor(other) < floor(file)
        assert below, f"{file} (floor {floor(file)}) imports {other} (floor {floor(other)})"
    from_the_front_door = {name.split(".")[1] for name in imports(file) if name.startswith("jaxformer.")}
    assert from_the_front_door <= FLOORS.keys(), f"{file} imports through jaxformer/__init__.py"


def test_no_import_circle():
    seen = {file: files_seen(file) for file in FILES}
    while free := {file for file, others in seen.items() if not others & seen.keys()}:
        seen = {file: others for file, others in seen.items() if file not in free}
    assert not seen, f"import each other: {sorted(seen)}"


def test_few_modules_at_the_top_level():
    assert len([file for file in FILES if file.count("/") == 1 and room(file)]) <= 8


def test_files_and_public_classes_have_a_name_each():
    """One name for two things makes every reader look twice."""
    # A file of config/ is named as its section, one of programs/ as its command, one of benchmarks/ as its suite.
    names = [
        Path(file).stem
        for file in FILES
        if Path(file).stem != "__init__" and room(file) not in ("config", "programs", "benchmarks")
    ]
    assert [name for name in sorted(set(names)) if names.count(name) > 1] == []
    classes = [
        node.name
        for file in FILES
        for node in parsed(file).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert [name for name in sorted(set(classes)) if classes.count(name) > 1] == []


@pytest.mark.parametrize("who, banned", BANS, ids=[who for who, _ in BANS])
def test_rooms_that_do_not_see_each_other(who, banned):
    for file in FILES:
        if room(file) == who:
            assert not rooms_seen(file) & banned, file


@pytest.mark.parametrize("package", OWNERS)
def test_packages_with_one_door(package):
    others = [f for f in FILES if room(f) != "benchmarks"]
    importers = {f for f in others if any(name.split(".")[0] == package for name in imports(f))}
    assert importers <= OWNERS[package]
    assert importers == OWNERS[package] or not OWNERS[package], "the ruler measures"


@pytest.mark.parametrize("file", [f for f in FILES if room(f) in PURE_ROOMS | {""}])
def test_pure_rooms_need_jax_and_numpy_only(file):
    packages = {name.split(".")[0] for name in imports(file)} - set(sys.stdlib_module_names) - {"jaxformer"}
    assert packages <= PURE_PACKAGES | {package for package, owners in OWNERS.items() if file in owners}


@pytest.mark.parametrize("file", FILES + PROGRAMS)
def test_files_stay_small(file):
    ceiling = MORE_LINES.get(file, LINES)
    if file.startswith("configs/"):
        ceiling = CONFIG_LINES
    elif file.startswith("experiments/"):
        ceiling = PROGRAM_LINES
    lines = len((ROOT / file).read_text(encoding="utf-8").splitlines())
    assert lines <= ceiling, f"{file} has {lines} lines; its ceiling is {ceiling}"


def test_no_drawer_for_everything():
    assert not [f for f in FILES + PROGRAMS if Path(f).stem in FORBIDDEN_NAMES]


def test_ceilings_are_for_files_that_are_there():
    assert set(MORE_LINES) <= set(FILES)


# Debts, to be paid and struck out: public functions without a docstring.
SILENT = {"jaxformer/decoding/request.py": ["token_ids"], "jaxformer/training/checkpoint/layout.py": ["read_meta"]}


def public_definitions(file):
    tree = parsed(file)
    yield Path(file).name, tree
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and not is_overload(node):
            yield node.name, node


def is_overload(node):
    return "overload" in map(ast.unparse, node.decorator_list)


@pytest.mark.parametrize("file", [f for f in FILES if Path(f).name != "__init__.py"])
def test_public_functions_classes_and_files_say_what_they_are(file):
    silent = [name for name, node in public_definitions(file) if not ast.get_docstring(node)]
    assert set(silent) <= set(SILENT.get(file, [])), f"{file}: no docstring: {', '.join(silent)}"


@pytest.mark.parametrize("name", jaxformer.__all__)
def test_public_names_are_documented(name):
    value = getattr(jaxformer, name)
    if name == "Params":  # an alias, explained where it is made
        return
    assert value.__doc__ and not value.__doc__.startswith(f"{name}("), f"{name} has no docstring of its own"


def test_the_front_door_lists_what_it_has():
    tree = ast.parse((ROOT / "jaxformer/__init__.py").read_text(encoding="utf-8"))
    imported = {a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert imported == set(jaxformer.__all__) and len(jaxformer.__all__) == len(set(jaxformer.__all__))


def test_importing_jaxformer_loads_nothing_heavy():
    program = f"import sys, jaxformer; print([m for m in {NOT_LOADED} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert out.stdout.strip() == "[]"
