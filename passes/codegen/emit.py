"""Emit a program as one readable SPMD Python file: a class per distinct block, the root module last."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autoshard.passes.codegen.printing import WIDTH, expression, literal
from autoshard.passes.codegen.source_text import (
    Names,
    block_table,
    condition_lines,
    def_lines,
    layout_text,
    listed,
    literal_mesh,
    op_name,
    python_path,
    shape_text,
    step_comment,
    symbol_lines,
)
from autoshard.passes.ir.graph import Input, Ref
from autoshard.passes.ir.program import Program, Statement, reads
from autoshard.passes.ir.sizes import free_symbols
from autoshard.passes.lower.blocks import Segment, module_of, segments


@dataclass(frozen=True)
class Source:
    """The emitted file and what its root class takes and returns."""

    text: str
    inputs: tuple[str, ...]
    """names of the graph inputs that forward takes, in order: global tensors"""
    arguments: tuple[str, ...]
    """what forward calls them"""
    mutated: tuple[str, ...]
    """buffer names whose new values forward returns after the outputs"""
    modules: Mapping[int, str] = field(default_factory=dict)
    """line number → module, relative to the block, for lines that may communicate: names in profiles"""


def codegen(program: Program, title: str = "model") -> Source:
    """Python source of ``program``. ``title`` names the model in the file's docstring."""
    return _Emitter(program, title).emit()


@dataclass
class _BlockClass:
    name: str
    tensors: str
    methods: list[str]
    paths: list[str] = field(default_factory=list)


class _Emitter:
    def __init__(self, program: Program, title: str) -> None:
        self.program, self.title = program, title
        self.mesh = program.mesh
        self.sizes = dict(zip(self.mesh.axes, self.mesh.shape, strict=True))
        self.inputs = {i.name: i for i in program.graph.inputs}
        self.arguments = [i for i in program.graph.inputs if i.kind == "input"]
        self.segments = segments(program)
        self.classes: list[_BlockClass] = []
        self.method_of: dict[int, str] = {}
        self.symbols = [s.name for s in program.graph.symbols.read]
        self.marks: dict[str, int] = {}
        self.tensors = self._tensors()
        self.read_later = self._read_later()
        operations = (s.node for s in program.statements if s.step is None and s.node is not None)
        self.last_of = {node.fqn: node for node in operations}

    def emit(self) -> Source:
        self._blocks()
        root = self._root()
        header = [
            f'"""{self.title} on mesh {self.mesh}: what every rank runs, on its own shards.',
            "",
            "Comments: local/global sizes and the layout; S(d)@axis: sharded along dim d, P@axis: a summand,",
            "R@axis: whole (its gradient is a summand), I@axis (not shown): whole, and so is its gradient.",
            '"""',
            "",
            "import torch",
            "import torch.nn.functional as F",
            "",
            "from autoshard import runtime",
            "",
            "aten = torch.ops.aten",
            f"MESH = {literal_mesh(self.sizes)}",
        ]
        body = "\n".join([*header, *(self._class_text(c) for c in self.classes), root])
        body += '\n\n\nif __name__ == "__main__":\n    runtime.main(RankModule, __file__)\n'
        if "F." not in body.split("aten = ", 1)[1]:
            body = body.replace("import torch.nn.functional as F\n", "", 1)
        if "aten." not in body.split("aten = torch.ops.aten\n", 1)[1]:
            body = body.replace("aten = torch.ops.aten\n", "", 1)
        text, modules = self._unmarked(body)
        names = tuple(self.argument_names[i.name] for i in self.arguments)
        return Source(text, tuple(i.name for i in self.arguments), names, tuple(self.program.mutations), modules)

    # --- blocks ---

    def _tensors(self) -> dict[str, list[Input]]:
        """Parameters and buffers by the block that holds them ("" for the root)."""
        paths = dict.fromkeys(s.path for s in self.segments if s.path)
        held: dict[str, list[Input]] = {path: [] for path in ("", *paths)}
        for value in self.program.graph.inputs:
            if value.kind == "input":
                continue
            owner = next((p for p in paths if value.fqn.startswith(p + ".")), "")
            held[owner].append(value)
        return held

    def _read_later(self) -> list[frozenset[str]]:
        """Per segment: local names that later segments read, or that are returned."""
        later = {r.name for r in self.program.outputs if isinstance(r, Ref)} | set(self.program.mutations.values())
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
            same = next((c for c in self.classes if c.tensors == tensors and c.methods == texts), None)
            if same is None:
                same = _BlockClass(self._class_name(path), tensors, texts)
                self.classes.append(same)
            same.paths.append(path)

    def _class_name(self, path: str) -> str:
        stacks = (n.module_types for n in self.program.graph.nodes)
        found = next((kind for stack in stacks for p, kind in stack if p == path), "Block")
        base = re.sub(r"\W", "_", found.rpartition(".")[2])
        taken = {c.name for c in self.classes}
        name, n = base, 2
        while name in taken or name == "RankModule":
            name, n = f"{base}_{n}", n + 1
        return name

    def _class_text(self, block: _BlockClass) -> str:
        lines = ["", "", f"class {block.name}(runtime.Block):", f'    """{listed(block.paths)}"""', ""]
        lines.append(block.tensors)
        for i, method in enumerate(block.methods):
            lines.append(method.replace("def forward(", f"def forward_{i}(", 1) if i else method)
        return "\n".join(line for line in lines).rstrip("\n")

    def _tensor_table(self, path: str) -> str:
        """``TENSORS = {...}``: every parameter and buffer, its global shape, dtype and layout."""
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
        names = Names(self.symbols)
        for name in segment.inputs:
            names.fresh(name, self._argument_name(name))
        signature = ["self", *(names.of[n] for n in segment.inputs), *self._symbols(segment)]
        body = self._statements(segment, names, segment.path, frozenset(segment.outputs))
        returned = ", ".join(names.of[o] for o in segment.outputs)
        lines = [*def_lines("forward", signature), *body, f"        return {returned}".rstrip()]
        return "\n".join(lines) + "\n"

    def _symbols(self, segment: Segment) -> list[str]:
        """The lengths that the segment computes with, from outside."""
        used = set().union(*(free_symbols(s.call) for s in segment.statements))
        return [name for name in self.symbols if name in used]

    def _argument_name(self, local: str) -> str:
        """A name that is the same in every equal block: what made the value, without its number."""
        value = self.program.values.get(local, local)
        if value in self.inputs:
            return self.inputs[value].fqn.replace(".", "_")
        producer = self.program.graph.producers[value]
        return "x" if self.program.types[local].grad else op_name(producer.name)

    # --- statements ---

    def _statements(self, segment: Segment, names: Names, path: str, kept: frozenset[str]) -> list[str]:
        """``kept``: names whose values are read after the segment."""
        last_use = {name: i for i, s in enumerate(segment.statements) for name in reads(s)}
        lines: list[str] = []
        for i, statement in enumerate(segment.statements):
            lines += self._statement(statement, names, path, i, last_use, kept)
        return lines

    def _statement(
        self, s: Statement, names: Names, path: str, i: int, last_use: Mapping[str, int], kept: frozenset[str]
    ) -> list[str]:
        for name in reads(s):
            if name not in names.of:
                names.of[name] = self._own(name, path)
        printed = expression(s.call, names.of, self.sizes)
        targets = []
        for out in s.outputs:
            if out == "_":
                targets.append("_")
                continue
            source = reads(s)[len(targets)] if s.step is not None else ""
            dead = source and last_use.get(source) == i and source not in kept and names.of[source] in names.taken
            dead = dead and names.of[source] not in targets  # one value may go two ways in one statement
            targets.append(names.reuse(out, source) if dead else names.fresh(out, self._wanted(s, out, path)))
        comment = self._comment(s)
        prefix = self._targets(s, targets)
        lines = printed.lines(prefix, "        ")
        if s.members and len(lines[0]) > WIDTH:
            lines = ["        (", *(f"            {t}," for t in targets), *printed.lines(") = ", "        ")]
        mark = self._mark(s, path) if any("runtime." in line for line in lines) else ""
        if len(lines) == 1 and len(lines[0]) + len(comment) + 4 <= WIDTH:
            return [f"{lines[0]}  # {comment}{mark}"]
        return [f"        # {comment}", *(line + mark for line in lines)]

    def _mark(self, s: Statement, path: str) -> str:
        """What a line that may communicate ends in until line numbers are known: the number of its module."""
        module = module_of(s, self.program.graph)
        inside = not path or f"{module}.".startswith(f"{path}.")
        relative = module[len(path) :].removeprefix(".") if inside else ""
        return f"\0{self.marks.setdefault(relative, len(self.marks))}"

    def _unmarked(self, text: str) -> tuple[str, dict[int, str]]:
        """The text without marks, and the module of every marked line."""
        lines = [line.partition("\0") for line in text.split("\n")]
        modules = list(self.marks)
        found = {number: modules[int(mark)] for number, (_, _, mark) in enumerate(lines, 1) if mark}
        return "\n".join(line for line, _, _ in lines), found

    def _targets(self, s: Statement, targets: Sequence[str]) -> str:
        """The left side of an assignment; a result with more parts than are needed is taken apart."""
        if not targets:
            return ""
        if s.members:
            return f"{', '.join(targets)} = " if len(targets) > 1 else f"({targets[0]},) = "
        returns = s.node.op._schema.returns if s.node is not None and s.step is None else ()
        is_list = len(returns) == 1 and "List" in str(returns[0].type)
        if len(returns) <= 1 and not is_list:
            return f"{targets[0]} = "
        complete = len(returns) == len(targets) if not is_list else self._is_complete(s)
        return ", ".join(targets) + (" = " if complete and len(targets) > 1 else ", *_ = ")

    def _is_complete(self, s: Statement) -> bool:
        """Whether the named results of a split make up all of its operand."""
        types = self.program.types
        named = [o for o in s.outputs if o != "_"]
        if s.node is not None and s.node.op is torch.ops.aten.where.default:
            return len(named) == len(s.outputs) == len(types[s.node.inputs[0]].shape)
        if any(types[o].unknown for o in named):
            return False
        return (
            s.node is not None
            and len(named) == len(s.outputs)
            and sum(math.prod(types[o].shape) for o in named) == math.prod(types[s.node.inputs[0]].shape)
        )

    def _own(self, name: str, path: str) -> str:
        fqn = self.inputs[name].fqn
        return python_path(fqn[len(path) + 1 :] if path and fqn.startswith(path + ".") else fqn)

    def _wanted(self, s: Statement, out: str, path: str) -> str:
        node = s.node
        value = next((m.value for m in s.members if m.outputs[0] == out), s.value)
        if value in self.inputs:
            return "_".join(self.inputs[value].fqn.split(".")[-2:])
        if node is None or s.step is not None:
            return op_name(s.value or out)
        leaf = node.fqn.rpartition(".")[2]
        deeper = node.fqn != path and not leaf.isdigit() and leaf
        if deeper and node is self.last_of.get(node.fqn):
            return leaf
        return op_name(node.name)

    def _comment(self, s: Statement) -> str:
        if s.step is not None:
            return step_comment(s)
        made = [
            shape_text(self.program.types[o], layout) + layout_text(layout)
            for o, layout in zip(s.outputs, s.layouts, strict=True)
            if layout is not None
        ]
        source = s.node.source if s.node is not None else ""
        return "; ".join(made) + (f"  {source}" if source else "")

    # --- the root ---

    def _root(self) -> str:
        names = Names(self.symbols)
        for value in self.arguments:
            names.fresh(value.name, value.fqn)
        self.argument_names = dict(names.of)
        signature = ["self", *(names.of[i.name] for i in self.arguments)]
        body: list[str] = []
        for number, segment in enumerate(self.segments):
            if segment.path:
                body += self._block_call(number, segment, names)
            else:
                body += self._statements(segment, names, "", self.read_later[number])
        returned = []
        for out in (*self.program.outputs, *(Ref(n) for n in self.program.mutations.values())):
            if isinstance(out, Ref):
                returned.append(names.of.get(out.name) or self._own(out.name, ""))
            else:
                returned.append(literal(out))
        tuple_ = ", ".join(returned) + ("," if len(returned) == 1 else "")
        last = f"        return ({tuple_})"
        lines = ["", "", "class RankModule(runtime.RankModule):", f'    """{self.title}"""', "", "    MESH = MESH"]
        if any(m.call.fn == "gather_parameters" for segment in self.segments for m in segment.statements):
            lines.append("    GATHERS = True")
        lines += [block_table((c.name, c.paths) for c in self.classes), self._tensor_table("")]
        lines += def_lines("forward", signature)
        lines += self._symbol_lines()
        lines += body
        if len(last) <= WIDTH:
            lines.append(last)
        else:
            lines += ["        return (", *(f"            {r}," for r in returned), "        )"]
        return "\n".join(lines)

    def _symbol_lines(self) -> list[str]:
        symbols = self.program.graph.symbols.read
        shapes = {i.name: self.program.types[i.name].shape for i in self.arguments}
        return symbol_lines(symbols, self.argument_names, shapes) + condition_lines(
            self.program.graph.symbols, self.argument_names, shapes
        )

    def _block_call(self, number: int, segment: Segment, names: Names) -> list[str]:
        for name in segment.inputs:
            if name not in names.of:
                names.of[name] = self._own(name, "")
        method = self.method_of[number]
        call = python_path(segment.path) + ("" if method == "forward" else f".{method}")
        given = [*(names.of[n] for n in segment.inputs), *self._symbols(segment)]
        arguments = ", ".join(given)
        later = self.read_later[number]
        targets = []
        for out in segment.outputs:
            again = next(
                (n for n in segment.inputs if n not in later and n not in self.inputs and names.of[n] not in targets),
                None,
            )
            same = len(segment.outputs) == 1 and again is not None
            targets.append(names.reuse(out, again) if same and again else names.fresh(out, "x"))
        line = f"        {', '.join(targets)} = {call}({arguments})" if targets else f"        {call}({arguments})"
        if len(line) <= WIDTH:
            return [line]
        inner = f"            {arguments}"
        head = line[: len(line) - len(arguments) - 1]
        if len(inner) <= WIDTH:
            return [head, inner, "        )"]
        return [head, *(f"            {name}," for name in given), "        )"]
