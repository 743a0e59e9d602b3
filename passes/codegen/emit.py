"""Emit a program as one readable SPMD Python file: a class per distinct block, the root module last."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.passes.codegen.body import Body
from autoshard.passes.codegen.loops import rolled
from autoshard.passes.codegen.printing import WIDTH, length, literal
from autoshard.passes.codegen.source_text import (
    Names,
    block_table,
    condition_lines,
    def_lines,
    listed,
    literal_mesh,
    shape_text,
    symbol_lines,
)
from autoshard.passes.codegen.wanted import Wanted
from autoshard.passes.ir.graph import Input, Ref
from autoshard.passes.ir.memory import Recomputed
from autoshard.passes.ir.program import Program
from autoshard.passes.ir.sizes import free_symbols
from autoshard.passes.lower.blocks import Segment, segments


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


def codegen(program: Program, title: str = "model", recomputed: Sequence[Recomputed] = ()) -> Source:
    """Python source of ``program``. ``title`` names the model in the file's docstring.

    ``recomputed``: what the backward makes again, for comments.
    """
    return _Emitter(program, title, recomputed).emit()


@dataclass
class _BlockClass:
    name: str
    tensors: str
    methods: list[str]
    paths: list[str] = field(default_factory=list)


class _Emitter:
    def __init__(self, program: Program, title: str, recomputed: Sequence[Recomputed]) -> None:
        self.program, self.title = program, title
        self.recomputed = {r.name: r for r in recomputed}
        self.mesh = program.mesh
        self.sizes = dict(zip(self.mesh.axes, self.mesh.shape, strict=True))
        self.arguments = [i for i in program.graph.inputs if i.kind == "input"]
        self.segments = segments(program)
        self.classes: list[_BlockClass] = []
        self.method_of: dict[int, str] = {}
        self.symbols = [s.name for s in program.graph.symbols.read]
        self.marks: dict[str, int] = {}
        self.tensors = self._tensors()
        self.read_later = self._read_later()
        self.wanted = Wanted(program, self.segments)

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
            names.fresh(name, *self.wanted.argument(name, segment))
        signature = ["self", *(names.of[n] for n in segment.inputs), *self._symbols(segment)]
        body = Body(self.program, self.wanted, segment.path, names, self.recomputed)
        body.add(segment, frozenset(segment.outputs))
        returned = ", ".join(names.of[o] for o in segment.outputs)
        lines = def_lines("forward", signature)
        for line in body.written:
            lines += line.lines(" " * 8, self._mark)
        return "\n".join([*lines, f"        return {returned}".rstrip()]) + "\n"

    def _symbols(self, segment: Segment) -> list[str]:
        """The lengths that the segment computes with, from outside."""
        if not self.symbols:
            return []
        used = set().union(*(free_symbols(s.call) for s in segment.statements))
        return [name for name in self.symbols if name in used]

    # --- modules of lines, for profiles ---

    def _mark(self, module: str) -> str:
        """What a line that may communicate ends in until line numbers are known: the number of its module."""
        return f"\0{self.marks.setdefault(module, len(self.marks))}"

    def _unmarked(self, text: str) -> tuple[str, dict[int, str]]:
        """The text without marks, and the module of every marked line."""
        lines = [line.partition("\0") for line in text.split("\n")]
        modules = list(self.marks)
        found = {number: modules[int(mark)] for number, (_, _, mark) in enumerate(lines, 1) if mark}
        return "\n".join(line for line, _, _ in lines), found

    # --- the root ---

    def _root(self) -> str:
        names = Names(self.symbols)
        for value in self.arguments:
            names.fresh(value.name, value.fqn)
        self.argument_names = dict(names.of)
        signature = ["self", *(names.of[i.name] for i in self.arguments)]
        body = Body(self.program, self.wanted, "", names, self.recomputed)
        kinds = {path: c.name for c in self.classes for path in c.paths}
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
        lines = ["", "", "class RankModule(runtime.RankModule):", f'    """{self.title}"""', "", "    MESH = MESH"]
        if any(m.call.fn == "gather_parameters" for segment in self.segments for m in segment.statements):
            lines.append("    GATHERS = True")
        if any(s.again for s in self.program.statements):
            lines.append("    AGAIN = True")
        lines += [block_table((c.name, c.paths) for c in self.classes), self._tensor_table("")]
        lines += def_lines("forward", signature)
        lines += self._symbol_lines()
        lines += rolled(body.written, self._children(), {*names.holder, *names.fixed}, self._mark)
        if len(last) <= WIDTH:
            lines.append(last)
        else:
            lines += ["        return (", *(f"            {r}," for r in returned), "        )"]
        return "\n".join(lines)

    def _children(self) -> dict[str, set[str]]:
        """Container of blocks → names of all that it holds."""
        blocks = [path for c in self.classes for path in c.paths]
        found: dict[str, set[str]] = {path.rpartition(".")[0]: set() for path in blocks}
        for path in (*blocks, *(value.fqn for value in self.tensors[""])):
            for container in found:
                if path.startswith(f"{container}."):
                    found[container].add(path[len(container) + 1 :].partition(".")[0])
        return found

    def _symbol_lines(self) -> list[str]:
        symbols = self.program.graph.symbols.read
        shapes = {i.name: self.program.types[i.name].shape for i in self.arguments}
        layouts = self.program.layouts
        local = {
            name: [length(n, layouts[name].axes_of(dim), self.sizes) for dim, n in enumerate(shape)]
            for name, shape in shapes.items()
        }
        return symbol_lines(symbols, self.argument_names, shapes) + condition_lines(
            self.program.graph.symbols, self.argument_names, local
        )
