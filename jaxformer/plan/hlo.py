"""Reads the text of a compiled program: its instructions, and how many times a call runs each of them.

Uses only what XLA prints (`compiled.as_text()`). A loop's trip count is the one XLA notes, or follows from its
condition, start and increment. The only loop without one is the loop over the updates of a dispatch, which counts once:
so all numbers are per update.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxformer.functional.expert_rows import SELDOM

BYTES = {"pred": 1.0, "bf16": 2.0, "token": 0.0, "opaque": 0.0}  # other types have their bits in their name
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<= ]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")


@dataclass(frozen=True)
class Shape:
    """One array: element type, sizes, and whether it is in the device's main memory (a TPU's S(1) is not)."""

    dtype: str
    sizes: tuple[int, ...]
    main_memory: bool = True

    @property
    def bytes(self) -> float:
        """Bytes without padding; an element of "s4" takes 0.5, of "f8e4m3fn" 1."""
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        return math.prod(self.sizes) * BYTES.get(self.dtype, int(bits[1]) / 8 if bits else 0.0)


@dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
      name: unique in its computation.
      opcode: "all-gather", "fusion", ...
      shapes: arrays of its result, in order if it is a tuple.
      operands: names.
      text: its attributes, after the operands.
      literal: text between the parentheses: a constant's value, a parameter's number.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    text: str
    literal: str = ""

    def attribute(self, name: str) -> str | None:
        """The value of `name=`, up to the next comma outside brackets."""
        start = re.search(rf"(?:^|[ ,]){re.escape(name)}=", self.text)
        if start is None:
            return None
        depth, begin = 0, start.end()
        for i, c in enumerate(self.text[begin:], begin):
            depth += (c in "{[(") - (c in "}])")
            if depth < 0 or (c == "," and depth == 0):
                return self.text[begin:i]
        return self.text[begin:]

    @property
    def bytes(self) -> float:
        """Bytes of its result."""
        return sum(s.bytes for s in self.shapes)


@dataclass
class Computation:
    """Instructions by name, in order; `root` names the one marked ROOT, its result."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    def sizes(self, instruction: Instruction) -> float:
        """Bytes of an instruction's operands."""
        return sum(self.instructions[o].bytes for o in instruction.operands if o in self.instructions)


@dataclass
class Program:
    """All computations of one program."""

    computations: dict[str, Computation]
    entry: str

    def runs(
        self, name: str | None = None, times: float = 1.0, fused: bool = False
    ) -> Iterator[tuple[Computation, Instruction, float, bool]]:
        """Every instruction that runs, without those of `expert_rows.SELDOM`: its computation, itself, how often in one
        update, and whether it is inside a fusion (where it reads and writes no memory). The arguments are for its own
        recursion into called computations.
        """
        computation = self.computations[self.entry if name is None else name]
        for instruction in computation.instructions.values():
            yield computation, instruction, times, fused
            inside = times * (self.trips(computation, instruction) if instruction.opcode == "while" else 1)
            if instruction.opcode == "while" and f"/{SELDOM}/" in instruction.text:
                continue
            for called in self.called(instruction):
                yield from self.runs(called, inside, fused or instruction.opcode == "fusion")

    def called(self, instruction: Instruction) -> list[str]:
        """Computations that an instruction runs, except a reduction's function of two numbers."""
        if instruction.opcode not in ("while", "fusion", "call", "conditional", "async-start"):
            return []
        names = _CALLED.findall(instruction.text)
        branches = instruction.attribute("branch_computations")
        names += [] if branches is None else [b.strip(" %") for b in branches.strip("{}").split(",")]
        return [n for n in names if n in self.computations]

    def trips(self, computation: Computation, loop: Instruction) -> float:
        """How often a loop runs; 1 if unknown."""
        if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.text):
            return float(noted[1])
        condition = self.computations.get((loop.attribute("condition") or "").strip("%"))
        body = self.computations.get((loop.attribute("body") or "").strip("%"))
        compare = self._comparison(condition) if condition is not None else None
        if body is None or compare is None:
            return 1.0
        index, bound, inclusive = compare
        start = self._initial(computation, loop, index) or 0
        step = self._increment(computation, loop, body, index) or 1
        return float(max(0, math.ceil((bound + inclusive - start) / step)))

    def _initial(self, computation: Computation, loop: Instruction, index: int) -> int | None:
        """The constant initial value of entry `index` of a loop's state."""
        return _constant(_entry(computation, loop.operands[0], index)) if loop.operands else None

    def _increment(self, outer: Computation, loop: Instruction, body: Computation, index: int) -> int | None:
        """What one iteration adds to entry `index`; 2 if the compiler has unrolled the loop by two."""
        added = _entry(body, body.root, index)
        if added is None or added.opcode != "add":
            return None
        for operand in added.operands:
            found = _source(body, operand)
            if found is not None and found.opcode == "get-tuple-element":
                other = int(found.attribute("index") or 0)
                value = None if other == index else self._initial(outer, loop, other)
            else:
                value = _constant(found)
            if value is not None:
                return value
        return None

    def _comparison(self, condition: Computation) -> tuple[int, int, int] | None:
        """(counter's index in the loop's state, bound, 1 if the bound is included), also if inside a fusion."""
        outer = condition
        root = condition.instructions.get(condition.root)
        arguments: list[str] = []
        if root is not None and root.opcode in ("fusion", "call"):
            arguments = list(root.operands)
            condition = self.computations[self.called(root)[0]]
            root = condition.instructions.get(condition.root)
        if root is None or root.opcode != "compare":
            return None

        def resolve(name: str) -> Instruction | None:
            found = _source(condition, name)
            if found is not None and found.opcode == "parameter" and arguments:
                return outer.instructions.get(arguments[int(found.literal or 0)])
            return found

        left, right = (resolve(o) for o in root.operands)
        direction = root.attribute("direction")
        if direction in ("GT", "GE"):
            left, right, direction = right, left, {"GT": "LT", "GE": "LE"}[direction]
        bound = _constant(right)
        if left is None or left.opcode != "get-tuple-element" or bound is None or direction not in ("LT", "LE"):
            return None
        return int(left.attribute("index") or 0), bound, int(direction == "LE")


def _source(computation: Computation, name: str) -> Instruction | None:
    """The instruction of that name, or what it is a copy of."""
    found = computation.instructions.get(name)
    while found is not None and found.opcode in ("bitcast", "copy", "convert") and found.operands:
        found = computation.instructions.get(found.operands[0])
    return found


def _entry(computation: Computation, name: str, index: int) -> Instruction | None:
    """The instruction that gives entry `index` of the tuple of that name."""
    found = computation.instructions.get(name)
    if found is None or found.opcode != "tuple" or index >= len(found.operands):
        return None
    return _source(computation, found.operands[index])


def _constant(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant" or not re.fullmatch(r"-?\d+", instruction.literal):
        return None
    return int(instruction.literal)


def shapes(text: str) -> tuple[Shape, ...]:
    """All arrays in the text of a type.

    >>> [s.bytes for s in shapes("(f32[2,3]{1,0:T(8,128)}, bf16[4]{0:S(1)})")], shapes("s32[]")[0].sizes
    ([24.0, 8.0], ())
    """
    return tuple(
        Shape(dtype, tuple(int(n.replace("<=", "")) for n in sizes.split(",") if n.strip()), "S(1)" not in layout)
        for dtype, sizes, layout in _SHAPE.findall(text)
    )


def read(text: str) -> Program:
    """The program of `compiled.as_text()`."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            head = re.match(r"(ENTRY )?%?([\w.\-]+) ", line)
            if head is not None and not line.startswith("HloModule"):
                current = computations.setdefault(head[2], Computation(head[2]))
                entry = head[2] if head[1] else entry
        elif current is not None and " = " in line and line.startswith(" "):
            instruction = _instruction(line.strip())
            if instruction is not None:
                current.instructions[instruction.name] = instruction
                if line.strip().startswith("ROOT "):
                    current.root = instruction.name
    return Program(computations, entry)


def _instruction(line: str) -> Instruction | None:
    name, rest = line.removeprefix("ROOT ").split(" = ", 1)
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    open_ = rest.find("(")
    if open_ < 0:
        return None
    close = _closing(rest, open_)
    inside = rest[open_ + 1 : close]
    opcode = rest[:open_]
    named = () if opcode in ("constant", "parameter") else tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name.strip(" %"), opcode, shapes(kind), named, rest[close + 1 :].lstrip(", "), inside)


def _closing(text: str, start: int) -> int:
    """The index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text) - 1
