"""Emit a program as one readable SPMD Python file, with a class per distinct block.
Consecutive calls of equal blocks are rolled into a loop: ``for block in self.blocks: x =
block(x)``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.mesh import Mesh
from autoshard.passes.codegen.body import FunctionBody, SourceFunction, SourceLine
from autoshard.passes.codegen.source_text import (
    LINE_WIDTH,
    Expression,
    NameScope,
    block_table,
    condition_lines,
    def_lines,
    docstring,
    format_paths,
    literal,
    literal_mesh,
    local_length,
    op_name,
    path_tuple,
    python_path,
    shape_text,
    singular_name,
    symbol_lines,
)
from autoshard.passes.codegen.variable_names import PreferredNames, without_moved_suffix
from autoshard.passes.ir.graph import Input, Ref
from autoshard.passes.ir.memory import Recomputed
from autoshard.passes.ir.program import Program
from autoshard.passes.ir.sizes import free_symbols
from autoshard.passes.ir.text import block_path, identifier
from autoshard.passes.lower.blocks import Segment, program_segments
from autoshard.passes.lower.bucket import prefetch_depth

_INDENT = " " * 8


@dataclass(frozen=True)
class _LoopCandidate:
    """``size`` lines from ``start``, one of which calls a block, that repeat ``count`` times."""

    start: int
    size: int
    path: str
    count: int

    @property
    def end(self) -> int:
        return self.start + self.size * self.count


def roll_loops(
    body: Sequence[SourceLine],
    children: Mapping[str, Collection[str]],
    taken: Collection[str],
    mark: Callable[[str], str],
) -> list[str]:
    """The text of the root's ``body`` with lines that are equal but for the block as loops.
    ``children``: container of blocks → names of its children. ``taken``: names that a loop
    variable may not have."""
    calls = [i for i, line in enumerate(body) if line.block]
    text: list[str] = []
    done = 0
    for here, following in itertools.pairwise([*calls, len(body)]):
        turn = _longest_loop(body, done, here, following) if here >= done else None
        if turn is None or turn.count < 2:
            continue
        for line in body[done : turn.start]:
            text += line.lines(_INDENT, mark)
        container, _, first = turn.path.rpartition(".")
        variable = _loop_variable(container, taken)
        numbers = range(int(first), int(first) + turn.count)
        text.append(f"{_INDENT}for {variable} in {_iterated_blocks(container, numbers, children[container])}:")
        for line in body[turn.start : turn.start + turn.size]:
            text += _with_loop_variable(line, turn.path, variable).lines(f"{_INDENT}    ", mark)
        done = turn.end
    for line in body[done:]:
        text += line.lines(_INDENT, mark)
    return text


def _longest_loop(body: Sequence[SourceLine], done: int, here: int, following: int) -> _LoopCandidate | None:
    """The longest loop whose first turn has the call at ``here``; lines before may belong to it."""
    if following == len(body):
        return None
    size, path = following - here, body[here].block
    starts = range(here, max(here - size, done - 1), -1)
    return max(
        (_LoopCandidate(start, size, path, _repetitions(body, start, size, path)) for start in starts),
        key=lambda t: t.count,
    )


def _repetitions(body: Sequence[SourceLine], start: int, size: int, path: str) -> int:
    """How often the ``size`` lines from ``start`` repeat, each time with the next block."""
    container, _, number = path.rpartition(".")

    def turn(n: int) -> list[Any]:
        lines = body[start + n * size : start + (n + 1) * size]
        own = ".".join(filter(None, (container, str(int(number) + n))))
        return (
            [_with_loop_variable(line, own, "").key for line in lines] if own in [line.block for line in lines] else []
        )

    first, n = turn(0), 1
    while turn(n) == first:
        n += 1
    return n


def _with_loop_variable(line: SourceLine, path: str, variable: str) -> SourceLine:
    """``line`` with ``variable`` in place of the block at ``path``, in its profiling scope, too."""
    module = line.module
    if module is not None and f"{module}.".startswith(f"{path}."):
        module = f"@{variable}{module[len(path) :]}"
    if isinstance(line, SourceFunction):
        return replace(line, body=tuple(_with_loop_variable(inner, path, variable) for inner in line.body))
    if line.block != path:
        return replace(line, module=module)
    value = line.value
    head = variable + value.head[len(python_path(path)) :]
    return replace(line, value=Expression(head, value.parts, value.close), module=module, block="")


def _loop_variable(container: str, taken: Collection[str]) -> str:
    plain = singular_name(container)
    numbered = (f"{plain}_{n}" for n in itertools.count(1))
    return next(name for name in itertools.chain([plain], numbered) if name not in taken)


def _iterated_blocks(container: str, numbers: range, children: Collection[str]) -> str:
    """Source of the blocks ``numbers``: the container, sliced if it has other children."""
    owner = python_path(container) if container else "self"
    if container and set(children) == set(map(str, numbers)) and numbers.start == 0:
        return owner
    return f"{owner}[{numbers.start or ''}:{numbers.stop}]"


@dataclass(frozen=True)
class Source:
    """The emitted file, and the signature of its root class."""

    text: str
    inputs: tuple[str, ...]
    """names of the graph inputs that forward takes, in order"""
    arguments: tuple[str, ...]
    """their argument names in forward"""
    mutated: tuple[str, ...]
    """fqns of buffers and inputs whose new values forward returns behind the outputs"""
    modules: Mapping[int, str] = field(default_factory=dict)
    """line number → module relative to the block, for profiles; only lines that may communicate"""


def codegen(program: Program, title: str = "model", recomputed: Sequence[Recomputed] = ()) -> Source:
    """Python source of ``program``; ``title`` names the model, ``recomputed`` is for comments."""
    file = _SourceFile()
    root, _ = _ProgramEmitter(program, title, recomputed, file).root()
    header = f"{title} on mesh {program.mesh}: what every rank runs, on its own shards."
    return file.whole(header, [root], program.mesh, root_class())[0]


def codegen_stages(
    programs: Sequence[Program], title: str, mesh: Mesh, axis: str, recomputed: Sequence[Sequence[Recomputed]]
) -> tuple[Source, ...]:
    """One file with the programs of all pipeline stages along ``axis``, as a source per stage."""
    file, roots, called = _SourceFile(), list[Source](), dict[str, str]()
    for number, (program, again) in enumerate(zip(programs, recomputed, strict=True)):
        what = f"stage {number} of {title}"
        root, returned = _ProgramEmitter(program, what, again, file, root_class(number), called).root()
        roots.append(root)
        called |= returned
    header = f"{title} on mesh {mesh}, in {len(programs)} stages along {axis}: what every rank runs, on its own shards."
    names = ", ".join(root_class(number) for number in range(len(roots))) + "," * (len(roots) == 1)
    return file.whole(header, roots, programs[0].mesh, f"({names})")


def root_class(number: int | None = None) -> str:
    """Name of the root class, or of that of stage ``number``."""
    return "RankModule" if number is None else f"Stage{number}"


SCRIPT_ENDING = '\n\n\nif __name__ == "__main__":\n    runtime.main({}, __file__)\n'


@dataclass
class _EmittedBlock:
    name: str
    tensors: str
    methods: list[str]
    paths: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        lines = ["", "", f"class {self.name}(runtime.Block):", f'    """{docstring(format_paths(self.paths))}"""', ""]
        lines.append(self.tensors)
        for i, method in enumerate(self.methods):
            lines.append(method.replace("def forward(", f"def forward_{i}(", 1) if i else method)
        return "\n".join(line for line in lines).rstrip("\n")


@dataclass
class _SourceFile:
    """What the programs of a file share: block classes, marks of lines that may communicate."""

    classes: list[_EmittedBlock] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)

    def whole(self, title: str, roots: Sequence[Source], mesh: Mesh, run: str) -> tuple[Source, ...]:
        """``roots``, each with the text of the complete file."""
        text, modules = self.unmarked(self.text(title, [root.text for root in roots], mesh, run))
        return tuple(replace(root, text=text, modules=modules) for root in roots)

    def text(self, title: str, roots: Sequence[str], mesh: Mesh, run: str) -> str:
        """The marked text of the file. ``run``: argument of ``runtime.main``, as source."""
        header = [
            f'"""{docstring(title)}',
            "",
            "Comments: local/global sizes and the layout; S(d)@axis: sharded along dim d, P@axis: a partial sum,",
            (
                "R@axis: replicated (its gradient is a partial sum), I@axis (not shown): "
                "replicated, and so is its gradient."
            ),
            '"""',
            "",
            "import torch",
            "import torch.nn.functional as F",
            "",
            "from autoshard import runtime",
            "",
            "aten = torch.ops.aten",
            f"MESH = {literal_mesh(mesh.sizes)}",
        ]
        body = "\n".join([*header, *(c.text for c in self.classes), *roots]) + SCRIPT_ENDING.format(run)
        if "F." not in body.split("aten = ", 1)[1]:
            body = body.replace("import torch.nn.functional as F\n", "", 1)
        if "aten." not in body.split("aten = torch.ops.aten\n", 1)[1]:
            body = body.replace("aten = torch.ops.aten\n", "", 1)
        return body

    def mark(self, module: str) -> str:
        """The mark at the end of a line that may communicate: the number of its module."""
        return f"\0{self.marks.setdefault(module, len(self.marks))}"

    def unmarked(self, text: str) -> tuple[str, dict[int, str]]:
        """The text without marks, and the module of every marked line."""
        lines = [line.partition("\0") for line in text.split("\n")]
        modules = list(self.marks)
        found = {number: modules[int(mark)] for number, (_, _, mark) in enumerate(lines, 1) if mark}
        return "\n".join(line for line, _, _ in lines), found


class _ProgramEmitter:
    def __init__(
        self,
        program: Program,
        title: str,
        recomputed: Sequence[Recomputed],
        file: _SourceFile,
        name: str = root_class(),
        called: Mapping[str, str] | None = None,
    ) -> None:
        """``called``: names of values that earlier pipeline stages send."""
        self.program, self.title, self.file, self.name, self.called = program, title, file, name, called or {}
        self.recomputed = {r.name: r for r in recomputed}
        self.arguments = list(program.graph.of_kind("input"))
        self.segments = program_segments(program)
        self.kinds: dict[str, list[str]] = {}
        """block class → paths of its blocks in this program"""
        self.method_of: dict[int, str] = {}
        self.symbols = [s.name for s in program.graph.symbols.read]
        self.tensors = self._tensors()
        self.read_later = self._read_later()
        self.offloaded = frozenset(program.assignment.offloaded)
        self.wanted = PreferredNames(program, self.segments)

    def root(self) -> tuple[Source, dict[str, str]]:
        """The root class, and returned value → its identifier. Adds block classes to the file."""
        self._blocks()
        text = self._root()
        names = tuple(self.argument_names[i.name] for i in self.arguments)
        made = Source(text, tuple(i.name for i in self.arguments), names, tuple(self.program.mutations))
        return made, self._returned()

    # --- blocks ---

    def _tensors(self) -> dict[str, list[Input]]:
        """Path of a block ("" for the root) → its parameters and buffers."""
        paths = dict.fromkeys(s.path for s in self.segments if s.path)
        held: dict[str, list[Input]] = {path: [] for path in ("", *paths)}
        for value in self.program.graph.inputs:
            if value.kind == "input":
                continue
            owner = block_path(value.fqn)
            held[owner if owner in paths and owner != value.fqn else ""].append(value)
        return held

    def _read_later(self) -> list[frozenset[str]]:
        """Per segment, the local names that are live after it."""
        later = set(self.program.returned)
        found = []
        for segment in reversed(self.segments):
            found.append(frozenset(later))
            later.update(segment.inputs)
        return found[::-1]

    def _blocks(self) -> None:
        """One class per distinct (tensors, methods)."""
        methods: dict[str, list[str]] = {}
        for number, segment in enumerate(self.segments):
            if not segment.path:
                continue
            texts = methods.setdefault(segment.path, [])
            text = self._method(segment)
            if text not in texts:
                texts.append(text)
            at = texts.index(text)
            self.method_of[number] = "forward" if at == 0 else f"forward_{at}"
        for path, texts in methods.items():
            tensors = self._tensor_table(path)
            same = next((c for c in self.file.classes if c.tensors == tensors and c.methods == texts), None)
            if same is None:
                same = _EmittedBlock(self._class_name(path), tensors, texts)
                self.file.classes.append(same)
            same.paths.append(path)
            self.kinds.setdefault(same.name, []).append(path)

    def _class_name(self, path: str) -> str:
        """The user's class name of the block at ``path``, numbered if it is taken."""
        stacks = (n.module_types for n in self.program.graph.nodes)
        found = next((kind for stack in stacks for p, kind in stack if p == path), "Block")
        base = identifier(found.rpartition(".")[2])
        taken = {c.name for c in self.file.classes}
        name, n = base, 2
        while name in taken or name == "RankModule" or re.fullmatch(r"Stage\d+", name):
            name, n = f"{base}_{n}", n + 1
        return name

    def _tensor_table(self, path: str) -> str:
        """``TENSORS = {...}``: dtype, shape and layout of each parameter and buffer of a block."""
        lines = []
        for value in self.tensors[path]:
            type_ = self.program.types[value.name]
            relative = value.fqn[len(path) + 1 :] if path else value.fqn
            dtype = str(type_.dtype).removeprefix("torch.")
            layout = self.program.layouts[value.name]
            lines.append(f"        {literal(relative)}: {literal(f'{dtype}{shape_text(type_, layout)}')},")
        if not lines:
            return "    TENSORS = {}\n"
        return "\n".join(["    TENSORS = {", *lines, "    }", ""])

    def _method(self, segment: Segment) -> str:
        names = NameScope(self.symbols)
        for name in segment.inputs:
            names.fresh(name, *self.wanted.argument(name, segment))
        signature = ["self", *(names.of[n] for n in segment.inputs), *self._symbols(segment)]
        body = FunctionBody(self.program, self.wanted, segment.path, names, self.recomputed)
        body.add(segment, frozenset(segment.outputs))
        returned = ", ".join(names.of[o] for o in segment.outputs)
        lines = def_lines("forward", signature)
        for line in body.written:
            lines += line.lines(" " * 8, self.file.mark)
        return "\n".join([*lines, f"        return {returned}".rstrip()]) + "\n"

    def _symbols(self, segment: Segment) -> list[str]:
        """The dynamic lengths that the segment reads."""
        if not self.symbols:
            return []
        used = set().union(*(free_symbols(s.call) for s in segment.statements))
        return [name for name in self.symbols if name in used]

    # --- the root ---

    def _root(self) -> str:
        names = NameScope(self.symbols)
        for value in self.arguments:
            sent = value.name in self.called
            names.fresh(value.name, *((self.called[value.name], op_name(value.name)) if sent else (value.fqn,)))
        self.names, self.argument_names = names, dict(names.of)
        signature = ["self", *(names.of[i.name] for i in self.arguments)]
        body = FunctionBody(self.program, self.wanted, "", names, self.recomputed, returns=False)
        kinds = {path: name for name, paths in self.kinds.items() for path in paths}
        for number, segment in enumerate(self.segments):
            if segment.path:
                method = self.method_of[number]
                call = "" if method == "forward" else f".{method}"
                body.call(segment, kinds[segment.path], call, self._symbols(segment), self.read_later[number])
            else:
                body.add(segment, self.read_later[number])
        returned = []
        for out in (*self.program.outputs, *(Ref(n) for n in self.program.mutations.values())):
            if isinstance(out, Ref):
                returned.append(names.of.get(out.name) or body.own(out.name))
            else:
                returned.append(literal(out))
        tuple_ = ", ".join(returned) + ("," if len(returned) == 1 else "")
        last = f"        return ({tuple_})"
        lines = [
            "",
            "",
            f"class {self.name}(runtime.RankModule):",
            f'    """{docstring(self.title)}"""',
            "",
            "    MESH = MESH",
        ]
        gathers = [s.call for s in self.program.statements if s.call.fn == "gather_parameters"]
        if not all(call.kwargs.get("zero") for call in gathers):
            lines.append("    GATHERS = True")
        if depth := prefetch_depth(self.program):
            lines.append(f"    PREFETCH = {depth}")
        if any(s.again for s in self.program.statements):
            lines.append("    RECOMPUTES = True")
        if offloaded := [path for paths in self.kinds.values() for path in paths if path in self.offloaded]:
            lines.append(path_tuple("OFFLOADS", offloaded))
        lines += [block_table(self.kinds.items()), self._tensor_table("")]
        lines += def_lines("forward", signature)
        lines += self._symbol_lines()
        lines += roll_loops(body.written, self._children(), {*names.holder, *names.fixed}, self.file.mark)
        if len(last) <= LINE_WIDTH:
            lines.append(last)
        else:
            lines += ["        return (", *(f"            {r}," for r in returned), "        )"]
        return "\n".join(lines)

    def _returned(self) -> dict[str, str]:
        both = zip(self.program.graph.outputs, self.program.outputs, strict=True)
        pairs = [(value, local) for value, local in both if isinstance(value, Ref) and isinstance(local, Ref)]
        names = self.names.of
        return {value.name: without_moved_suffix(names[local.name]) for value, local in pairs if local.name in names}

    def _children(self) -> dict[str, set[str]]:
        """Container of blocks → names of all its children."""
        blocks = [path for paths in self.kinds.values() for path in paths]
        found: dict[str, set[str]] = {path.rpartition(".")[0]: set() for path in blocks}
        for path in (*blocks, *(value.fqn for value in self.tensors[""])):
            for container in found:
                if path.startswith(f"{container}."):
                    found[container].add(path[len(container) + 1 :].partition(".")[0])
        return found

    def _symbol_lines(self) -> list[str]:
        symbols = self.program.graph.symbols.read
        shapes = {i.name: self.program.types[i.name].shape for i in self.arguments}
        layouts, mesh = self.program.layouts, self.program.mesh
        sizes = mesh.sizes
        local = {
            name: [local_length(n, layouts[name].axes_of(dim), sizes) for dim, n in enumerate(shape)]
            for name, shape in shapes.items()
        }
        return symbol_lines(symbols, self.argument_names, shapes) + condition_lines(
            self.program.graph.symbols, self.argument_names, local
        )
