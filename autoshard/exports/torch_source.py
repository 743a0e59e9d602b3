"""Export to torch: ``parallelize_module``, ``fully_shard``, recomputation, pipeline stages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from autoshard.errors import PlanError
from autoshard.exports.description import Description, ModuleStyle, is_whole, modules_of, patterns_text
from autoshard.layout import Placement, Replicate, Shard
from autoshard.report.tp_plan import module_patterns

_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
}


def _placed(placed: Placement | None) -> str:
    return f"Shard({placed.dim})" if isinstance(placed, Shard) else "Replicate()"


def _call(name: str, **arguments: str) -> str:
    return f"{name}({', '.join(f'{k}={v}' for k, v in arguments.items() if v)})"


def _style(style: ModuleStyle) -> str:
    """The ParallelStyle of a module as source; "" for none."""
    if style.kind == "sequence":
        dim = style.takes.dim if isinstance(style.takes, Shard) else 1
        return _call("SequenceParallel", sequence_dim=str(dim), use_local_output="True")
    if style.kind not in ("colwise", "rowwise"):
        return ""
    usual = Replicate() if style.kind == "colwise" else Shard(-1)
    takes = "" if style.takes == usual or (usual != Shard(-1) and is_whole(style.takes)) else _placed(style.takes)
    if style.in_loss:
        return _call("ColwiseParallel", input_layouts=takes, use_local_output="False")
    gives = "Replicate()" if style.kind == "colwise" and (style.is_returned or is_whole(style.wanted)) else ""
    if isinstance(style.wanted, Shard) and (style.kind == "rowwise" or style.wanted != Shard(-1)):
        gives = _placed(style.wanted)
    name = "ColwiseParallel" if style.kind == "colwise" else "RowwiseParallel"
    return _call(name, input_layouts=takes, output_layouts=gives)


def _output_style(style: ModuleStyle, styles: Mapping[str, ModuleStyle]) -> str:
    """A conversion of the output, shared by all linear layers that read it; "" for none."""
    if style.kind not in ("sequence", "replicate") or not is_whole(style.wanted):
        return ""
    by_products = all(r in styles and styles[r].kind == "colwise" for r in style.readers)
    if not isinstance(style.makes, Shard) and (len(style.readers) < 2 or not by_products):
        return ""
    local = "False" if by_products else "True"
    made = {"output_layouts": _placed(style.makes), "desired_output_layouts": "Replicate()", "use_local_output": local}
    return _call("PrepareModuleOutput", **made)


HEADER = '''"""{title} on {mesh}: parallel layouts of torch, written from a plan of autoshard.

Call in this order: ``mesh = make_mesh("cuda")``, ``model = parallelize(model, mesh)``; then make the optimizer.
{notes}"""

{imports}

AXES = {axes}
'''

PARALLELIZE = """

def make_mesh(device_type):
    \"\"\"The mesh of all ranks.{one}\"\"\"
    return init_device_mesh(device_type, ({sizes}), mesh_dim_names=({names}))


def parallelize(model, mesh):
    \"\"\"``model`` with sharded parameters, changed in place.\"\"\"
{body}    return model
"""

RECOMPUTE = """

def recompute_in_backward(module{contexts_argument}):
    \"\"\"Activation checkpointing of a module; names of parameters stay.\"\"\"
    forward = module.forward
    module.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False{contexts_use}, **kwargs)
"""

SELECTIVE = """

# results of these operations are kept, all others in the module are computed again
KEPT = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]
ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
KEPT += [getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in ATTENTION]
"""

PIPELINE = """

SPLITS = {splits}  # first layer of every stage but the first
STAGES_PER_RANK = {virtual}
MICRO_BATCHES = {micro_batches}


def make_stages(model, mesh, example_args, example_kwargs=None):
    \"\"\"The stages of this rank, each sharded; ``example_args``: one micro-batch of one rank.\"\"\"

    pipe = pipeline(model, example_args, example_kwargs, split_spec={{name: SplitPoint.BEGINNING for name in SPLITS}})
    pipe_mesh = mesh["{axis}"]

    numbers = range(pipe_mesh.get_local_rank(), len(SPLITS) + 1, pipe_mesh.size())
    for number in numbers:
        parallelize(pipe.get_stage_module(number), mesh)

    device = torch.device(mesh.device_type)
    return [pipe.build_stage(number, device, pipe_mesh.get_group()) for number in numbers]


def make_schedule(stages, loss_fn):
    \"\"\"Runs a step: ``schedule.step(batch)`` on the first rank, ``schedule.step(target=labels)`` on the last.\"\"\"
    return {schedule}({stages}, n_microbatches=MICRO_BATCHES, loss_fn=loss_fn)
"""


def torch_files(found: Description) -> dict[str, str]:
    """One Python file; it holds what a person would commit."""
    body, constants, uses, notes = [], [], dict[str, list[str]](), list[str]()
    known = {} if found.plan.staged is not None else {m: s for m, s in found.styles.items() if m}
    outputs = {m: text for m, s in known.items() if (text := _output_style(s, known))}
    converted = {reader for m in outputs for reader in known[m].readers}
    known |= {m: replace(known[m], takes=Replicate()) for m in converted if m in known}
    styles = {m: text for m, s in known.items() if (text := _style(s))}
    modules = modules_of(found.plan)
    if styles:
        constants.append(_table("STYLES", module_patterns(styles, modules)))
        body.append(f'    parallelize_module(model, mesh["{found.tp_axis}"], STYLES)')
        if outputs:
            constants.append(_table("OUTPUTS", module_patterns(outputs, modules)))
            body.append(f'    parallelize_module(model, mesh["{found.tp_axis}"], OUTPUTS)')
        kinds = {n for text in (*styles.values(), *outputs.values()) for n in re.findall(r"(\w+)\(", text)}
        placements = sorted(kinds & {"Replicate", "Shard"})
        uses["torch.distributed.tensor.parallel"] = [*sorted(kinds - set(placements)), "parallelize_module"]
        uses["torch.distributed.tensor"] = placements
        notes.append("Modules see local shards: a forward that counts heads must infer their number (``-1``).")
    if any(s.in_loss for s in found.styles.values()) and styles:
        notes.append(
            "Logits stay sharded: run loss and backward inside ``with loss_parallel():`` of torch.distributed.tensor.parallel."
        )
    recompute, lines = _recompute(found, uses)
    body += lines
    data, lines, needs_one = _data_parallel(found, uses, constants)
    body += lines
    names = [*found.plan.mesh.axes, *(["one"] if needs_one else [])]
    sizes = [*found.plan.mesh.shape, *([1] if needs_one else [])]
    if found.size("dp") > 1:
        notes.append(
            "Each data-parallel rank takes its rows of the batch; gradients are averaged, as of a mean loss over equal parts."
        )
    if found.micro_batches > 1 and found.plan.staged is None:
        late = ", with ``model.set_requires_gradient_sync(False)`` before all but the last" if found.zero < 2 else ""
        notes.append(
            f"A step accumulates {found.micro_batches} micro-batches, each loss divided by {found.micro_batches}{late}."
        )
    pipe = _pipeline(found, uses)
    uses.setdefault("torch.distributed.device_mesh", []).append("init_device_mesh")
    text = HEADER.format(
        title=found.plan.title or "The model",
        mesh=", ".join(f"{a}={n}" for a, n in found.plan.mesh.sizes.items()),
        notes="".join(f"{note}\n" for note in notes),
        imports=_imports(uses, "\n".join((recompute, pipe, *body))),
        axes=repr(dict(zip(names, sizes, strict=True))).replace("'", '"'),
    )
    text += "".join(constants) + data + recompute
    text += PARALLELIZE.format(
        one=" Axis ``one`` has one rank: modules on it are replicated, as by DDP." if needs_one else "",
        sizes=", ".join(map(str, sizes)) + ("," if len(sizes) == 1 else ""),
        names=", ".join(f'"{n}"' for n in names) + ("," if len(names) == 1 else ""),
        body="".join(f"{line}\n" for line in body),
    )
    return {"parallelize.py": text + pipe}


def _imports(uses: Mapping[str, list[str]], text: str) -> str:
    lines = [f"from {module} import {', '.join(sorted(set(names)))}" for module, names in uses.items() if names]
    plain = [f"import {name}" for name in ("fnmatch",) if f"{name}." in text]
    return "\n".join([*plain, *(["import torch"] if "torch." in text else []), *sorted(lines)])


def _table(name: str, rows: Mapping[str, str]) -> str:
    return f"\n{name} = {{\n" + "".join(f'    "{m}": {text},\n' for m, text in rows.items()) + "}\n"


def _recompute(found: Description, uses: dict[str, list[str]]) -> tuple[str, list[str]]:
    """Source of the helper, and calls of it, before data parallelism."""
    if not found.recompute:
        return "", []
    uses["torch.utils.checkpoint"] = ["checkpoint"]
    selective = {b for b, mode in found.recompute.items() if mode == "selective"}
    text, lines = "", []
    if selective:
        uses["torch.utils.checkpoint"].append("create_selective_checkpoint_contexts")
        uses["functools"] = ["partial"]
        text = SELECTIVE
    text += RECOMPUTE.format(
        contexts_argument=", contexts=None" if selective else "",
        contexts_use=", **({} if contexts is None else {'context_fn': contexts})" if selective else "",
    )
    for mode in ("full", "selective"):
        blocks = [b for b, m in found.recompute.items() if m == mode]
        extra = ", partial(create_selective_checkpoint_contexts, KEPT)" if mode == "selective" else ""
        if blocks:
            lines += [
                f"    for name in {_names(blocks, found)}:",
                f"        recompute_in_backward(model.get_submodule(name){extra})",
            ]
    return text, lines


def _names(blocks: list[str], found: Description) -> str:
    """Source of a sequence of block names."""
    stems = {b.rpartition(".")[0] for b in blocks}
    numbers = [int(b.rpartition(".")[2]) for b in blocks]
    if len(stems) == 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))) and not found.plan.staged:
        start = f"{numbers[0]}, " if numbers[0] else ""
        return f'[f"{stems.pop()}.{{i}}" for i in range({start}{numbers[-1] + 1})]'
    listed = "[" + ", ".join(f'"{b}"' for b in blocks) + "]"
    return f"[n for n in {listed} if n in dict(model.named_modules())]" if found.plan.staged else listed


def _data_parallel(found: Description, uses: dict[str, list[str]], constants: list[str]) -> tuple[str, list[str], bool]:
    """Source of policies, lines of :data:`PARALLELIZE`, whether an axis has one rank."""
    axes = found.axes("dp")
    if not axes:
        return "", [], False
    text, lines = "", list[str]()
    uses["torch.distributed.fsdp"] = ["fully_shard"]
    shards = found.fsdp_axes and tuple(a for a in axes if a in found.fsdp_axes)
    whole = sorted({n.rpartition(".")[0] for n in found.replicated_on})
    needs_one = not shards or bool(whole)
    arguments = [f"mesh={_submesh([a for a in axes if a not in shards], list(shards or ('one',)))}"]
    if found.precision:
        uses["torch.distributed.fsdp"].append("MixedPrecisionPolicy")
        fields = ", ".join(
            f"{k}={v if k == 'cast_forward_inputs' else f'torch.{v}'}" for k, v in found.precision.items()
        )
        text += f"\nPRECISION = MixedPrecisionPolicy({fields})\n"
        arguments.append("mp_policy=PRECISION")
    once = f"reshard_after_forward={found.zero in (0, 3)}"
    dims = {
        n: p.dim for n, placed in found.parameters.items() for a in shards if type(p := placed[a]) is Shard and p.dim
    }
    dims = {n: d for n, d in dims.items() if _divides(found, n)}
    if dims:
        text += _table("SHARD_DIMS", module_patterns({n: str(d) for n, d in dims.items()}, set(found.parameters)))
        uses.setdefault("torch.distributed.tensor", []).append("Shard")
        lines += [
            "    dims = {p: 0 for p in model.parameters()}",
            "    for pattern, dim in SHARD_DIMS.items():",
            "        dims |= {p: dim for n, p in model.named_parameters() if fnmatch.fnmatchcase(n, pattern)}",
        ]
        arguments.append("shard_placement_fn=lambda p: Shard(dims[p])")
    lines.append(f"    options = dict({', '.join(arguments)})")
    if whole:
        replicas = f"mesh={_submesh(list(axes), ['one'])}" + (", mp_policy=PRECISION" if found.precision else "")
        listed = "[" + ", ".join(f'"{m}"' for m in _patterns_of(whole)) + "]"
        text += f"\nREPLICATED = {listed}  # modules with replicated parameters\n"
        lines += [
            "    for name, module in list(model.named_modules()):",
            "        if any(fnmatch.fnmatchcase(name, pattern) for pattern in REPLICATED):",
            f"            fully_shard(module, {replicas})",
        ]
    if found.blocks:
        lines += [f"    for name in {_names(list(found.blocks), found)}:"]
        lines += [f"        fully_shard(model.get_submodule(name), {once}, **options)"]
    lines.append(f"    fully_shard(model, {once}, **options)")
    return text, lines, needs_one


def _divides(found: Description, name: str) -> bool:
    """Whether FSDP2 can shard a parameter along the plan's dim: only evenly if not dim 0."""
    layout, shape = found.plan.layouts[name], found.plan.shapes[name]
    dims = [
        d for d, n in enumerate(shape) if d and layout.axes_of(d) and n % found.plan.mesh.size_of(layout.axes_of(d))
    ]
    return not dims


def _patterns_of(modules: list[str]) -> list[str]:
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", m) for m in modules))


def _submesh(outer: list[str], inner: list[str]) -> str:
    """Source of the data-parallel mesh: replicas outside, shards inside."""
    names = ", ".join(f'"{a}"' for a in (*outer, *inner))
    return f"mesh[{names}]"


def _pipeline(found: Description, uses: dict[str, list[str]]) -> str:
    staged = found.plan.staged
    if staged is None:
        return ""
    first = {s: b for b, s in reversed(list(found.stage_of.items()))}
    if empty := [i for i in range(len(staged.plans)) if i not in first]:
        raise PlanError(
            f"export('torch'): stage {empty[0]} holds no layer of its own, and torch splits between layers. "
            "Plan with fewer stages, or fewer stages per rank"
        )
    schedule = _SCHEDULES[staged.schedule]
    is_multi = schedule.startswith("ScheduleInterleaved")
    uses["torch.distributed.pipelining"] = [schedule, "SplitPoint", "pipeline"]
    return PIPELINE.format(
        splits=repr([first[s] for s in sorted(first) if s]).replace("'", '"'),
        virtual=len(staged.plans) // found.size("pp"),
        micro_batches=staged.micro_batches,
        axis=staged.axis,
        schedule=schedule,
        stages="stages" if is_multi else "stages[0]",
    )


def torch_gaps(found: Description) -> Iterator[str]:
    """What the source does otherwise than the plan."""
    plan = found.plan
    if plan.staged is not None and found.size("tp") > 1:
        yield "torch's pipeline() traces stages into graphs, to which parallelize_module does not apply"
    if len([a for a in found.axes("dp") if a in found.fsdp_axes]) > 1:
        yield f"fully_shard shards over one mesh axis, the plan over {', '.join(found.fsdp_axes)}"
    dims = {n for n, p in found.parameters.items() for a in found.fsdp_axes if isinstance(x := p[a], Shard) and x.dim}
    if uneven := {n for n in dims if not _divides(found, n)}:
        yield f"fully_shard shards evenly along other dims than 0, so dim 0 is sharded of: {patterns_text(uneven)}"
    classes = {m: plan.modules.get(m, "") for m, s in found.styles.items() if s.kind in ("colwise", "rowwise")}
    if others := {m for m, name in classes.items() if not name.endswith(("Linear", "Embedding"))}:
        yield f"ColwiseParallel and RowwiseParallel need nn.Linear or nn.Embedding: {patterns_text(others)}"
    mixed = {m for m, s in found.styles.items() if s.wanted is None and not s.is_returned}
    if mixed:
        yield f"readers of these modules want several layouts: {patterns_text(mixed)}"
    if plan.zero and found.zero == 1 and found.micro_batches > 1:
        yield "ZeRO-1 reduces gradients once a step; fully_shard does so by set_requires_gradient_sync(False)"
