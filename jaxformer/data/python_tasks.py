"""Labelled examples at hand: tasks whose labels Python itself says of its source text.

They are made of the files of the standard library, and split as those are: no file is in both splits.

>>> (example,) = token_kinds("x = 1  # one")
>>> begins, ends, names = example.label
>>> [(example[a:b], name) for a, b, name in zip(begins, ends, names)]
[('x', 'name'), ('=', 'operator'), ('1', 'number'), ('# one', 'comment')]
>>> (example,) = exception_type("try:\\n    a[0]\\nexcept KeyError as e:\\n    pass\\n")
>>> print(example, example.label, sep="\\n")
try:
    a[0]
except HOLE as e:
    pass
KeyError
"""

import ast
import builtins
import hashlib
import io
import keyword
import symtable
import textwrap
import tokenize
from collections.abc import Callable, Iterator

from jaxformer.data.labelled_text import Example

VERSION = 1  # of the rules below; raised whenever the same text would give other examples
HOLE = "HOLE"
# Those that the library names often; of the others there are too few to learn from.
EXCEPTIONS = frozenset(
    {"AttributeError", "Exception", "ImportError", "IndexError", "KeyError", "OSError", "StopIteration", "TypeError",
     "ValueError"}
)  # fmt: skip
# Groups of operators of which each can stand where another one does.
_OPERATORS = (
    ("+", "-", "*", "/", "//", "%"), ("==", "!=", "<", "<=", ">", ">="), ("and", "or"), ("in", "not in"),
    ("is", "is not"), ("&", "|", "^"), ("<<", ">>"),
)  # fmt: skip
_LONGEST = 20  # lines of a function
_BEFORE, _AFTER = 8, 4  # lines around the name of an exception
_KINDS = {
    tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.OP: "operator", tokenize.COMMENT: "comment",
    **{getattr(tokenize, name): "string" for name in ("FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END")
       if hasattr(tokenize, name)},
}  # fmt: skip


def token_kinds(text: str) -> Iterator[Example]:
    """One example, the text itself; its label: [first characters, last ones (excluded), kinds] of Python's tokens.

    Kinds: keyword, name, number, string, operator, comment. White space has none. None at all of what is no Python.
    """
    lines = [0]
    for line in text.split("\n"):
        lines.append(lines[-1] + len(line) + 1)
    begins, ends, names = [], [], []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text, newline="\n").readline):
            kind = _KINDS.get(token.type)
            if token.type == tokenize.NAME:
                kind = "keyword" if keyword.iskeyword(token.string) else "name"
            if kind is not None and token.string:
                begins.append(lines[token.start[0] - 1] + token.start[1])
                ends.append(lines[token.end[0] - 1] + token.end[1])
                names.append(kind)
    except (tokenize.TokenError, SyntaxError):
        return
    if names:
        yield Example([text], [begins, ends, names])


def exception_type(text: str) -> Iterator[Example]:
    """The lines around each `except` that names one of EXCEPTIONS, with HOLE in its place; its label is the name.

    Source: Kanade et al. 2020, section 3 (exception type).
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.split("\n")
    for attempt in (node for node in ast.walk(tree) if isinstance(node, ast.Try)):
        for handler in attempt.handlers:
            name = handler.type
            if not isinstance(name, ast.Name) or name.id not in EXCEPTIONS:
                continue
            row = name.lineno - 1
            line = lines[row].encode()  # columns are of bytes
            line = line[: name.col_offset] + HOLE.encode() + line[name.end_col_offset :]
            last = min(handler.end_lineno or name.lineno, name.lineno + _AFTER)
            around = lines[max(attempt.lineno - 1, row - _BEFORE) : row], lines[row + 1 : last]
            yield Example([textwrap.dedent("\n".join([*around[0], line.decode(), *around[1]]))], name.id)


def wrong_operator(text: str) -> Iterator[Example]:
    """Functions with one binary operator, as it stands in the text or with another one of its group in its place; the
    label says which, "right" or "wrong", half of them each by the hash of the function.

    Source: Kanade et al. 2020, section 3 (wrong binary operator).
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.split("\n")
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or function.end_lineno is None:
            continue
        if function.end_lineno - function.lineno >= _LONGEST:
            continue
        found = [place for node in ast.walk(function) if (place := _operator(node, lines)) is not None]
        if not found:
            continue
        own = lines[function.lineno - 1 : function.end_lineno]
        random = int.from_bytes(hashlib.sha256("\n".join(own).encode()).digest()[:8], "big")
        row, column, name = sorted(set(found))[random % len(set(found))]
        label = "wrong" if random >> 32 & 1 else "right"
        if label == "wrong":
            others = [each for group in _OPERATORS if name in group for each in group if each != name]
            line = own[row - function.lineno + 1]
            other = others[(random >> 33) % len(others)]
            own[row - function.lineno + 1] = line[:column] + other + line[column + len(name) :]
        yield Example([textwrap.dedent("\n".join(own))], label)


def _operator(node: ast.AST, lines: list[str]) -> tuple[int, int, str] | None:
    """(index of the line, character in it, name) of the operator of an expression that stands on one line."""
    if isinstance(node, ast.BinOp):
        left, right = node.left, node.right
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = node.left, node.comparators[0]
    elif isinstance(node, ast.BoolOp):
        left, right = node.values[0], node.values[1]
    else:
        return None
    if left.end_lineno != right.lineno or left.end_col_offset is None:
        return None
    row = right.lineno - 1
    encoded = lines[row].encode()  # columns are of bytes
    between = encoded[left.end_col_offset : right.col_offset].decode()
    name = between.strip(" ()")
    if not any(name in group for group in _OPERATORS) or between.count(name) != 1:
        return None
    return row, len(encoded[: left.end_col_offset].decode()) + between.index(name), name


def name_roles(text: str) -> Iterator[Example]:
    """One example, the text itself; its label: [first characters, last ones (excluded), roles] of the names in it, as
    Python's symbol tables know them: parameter, local, free (of the function around), global, builtin."""
    try:
        tree, table = ast.parse(text), symtable.symtable(text, "text", "exec")
    except (SyntaxError, ValueError):
        return
    own = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    places = [0]
    lines = text.split("\n")
    for line in lines:
        places.append(places[-1] + len(line) + 1)
    found: dict[int, tuple[int, str]] = {}

    def visit(node: ast.AST, scope: symtable.SymbolTable) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                same = [each for each in scope.get_children() if each.get_name() == child.name]
                inner = next((each for each in same if _begins(each, child)), scope)
                for decorator in child.decorator_list:
                    visit(ast.Expression(decorator), scope)
                inside = [each for each in ast.iter_child_nodes(child) if each not in child.decorator_list]
                if inner is not scope:
                    for each in inside:
                        visit(ast.Module([each], []), inner)  # type: ignore[list-item]
                continue
            if isinstance(child, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
                continue  # scopes without a name, which differ between versions of Python
            name = child.id if isinstance(child, ast.Name) else child.arg if isinstance(child, ast.arg) else None
            if name is not None:
                role = _role(inner, name, own)
                row, column = child.lineno - 1, child.col_offset  # type: ignore[attr-defined]
                begin = places[row] + len(lines[row].encode()[:column].decode())
                if role is not None and text.startswith(name, begin):
                    found[begin] = begin + len(name), role
            visit(child, inner)

    visit(tree, table)
    if found:
        begins = sorted(found)
        yield Example([text], [begins, [found[b][0] for b in begins], [found[b][1] for b in begins]])


def _begins(table: symtable.SymbolTable, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return first <= table.get_lineno() <= node.lineno


def _role(scope: symtable.SymbolTable, name: str, own: set[str]) -> str | None:
    """What a name is in a scope; `own`: the names that the module itself defines."""
    try:
        symbol = scope.lookup(name)
    except KeyError:
        return None
    if symbol.is_parameter():
        return "parameter"
    if symbol.is_free():
        return "free"
    if scope.get_type() == "module" or symbol.is_global():
        return "builtin" if hasattr(builtins, name) and name not in own else "global"
    return "local" if symbol.is_local() else None


TASKS: dict[str, Callable[[str], Iterator[Example]]] = {
    "token_kinds": token_kinds,
    "exception_type": exception_type,
    "wrong_operator": wrong_operator,
    "name_roles": name_roles,
}
