"""Command line: ``autoshard plan|compile|verify|show|explain MODEL --mesh dp=2,tp=4``, ``demo``."""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoshard
from autoshard import models
from autoshard.errors import AutoshardError, HintError, MeshError, PlanError
from autoshard.hardware import PRESETS, free_memory
from autoshard.layout import Shard
from autoshard.mesh import Mesh
from autoshard.models.by_name import load
from autoshard.plans.plan import Plan

DEMO_MESH = {"dp": 2, "tp": 2}
DEMO_STEPS = 3


def demo(out: Path) -> int:
    """Compile, print, verify and save a GPT on 2 × 2 simulated ranks; exit status 0 if verified."""
    reference = models.get("gpt")
    args, kwargs = reference.inputs(batch=4)
    mesh = autoshard.Mesh(DEMO_MESH, hardware="ideal_network")
    torch.manual_seed(0)
    model = reference.model()
    print(
        f"A GPT with {sum(p.numel() for p in model.parameters()):,} parameters on {mesh.size} ranks (mesh {mesh}), "
        "as threads of this process.\n"
        'hardware="ideal_network": communication is next to free, so that everything that can be split is split. On\n'
        "real hardware (the default is h100) the best plan for so small a model is to keep it whole on every rank."
    )
    sharded = autoshard.compile(model, mesh, args, kwargs)
    _print_title("The plan, its collectives, and what it costs")
    print(sharded.plan)
    _print_title("The generated source that every rank runs: one of its classes")
    print(class_text(sharded.source, "Block"))
    _print_title(
        f"Sharded against unsharded, in float64: outputs, gradients, and weights after {DEMO_STEPS} steps of AdamW"
    )
    report = autoshard.verify(model.double(), mesh, args, kwargs, steps=DEMO_STEPS)
    print(report)
    sharded.save(out)
    sharded.visualize(out / "plan.html")
    _print_title("Files")
    _print_files(out, mesh.size)
    return 0 if report.ok else 1


def class_text(source: str, name: str) -> str:
    """The text of class ``name`` in Python ``source``."""
    found = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
    return "\n".join(source.splitlines()[found.lineno - 1 : found.end_lineno])


def _print_title(text: str) -> None:
    print(f"\n=== {text}\n")


def _print_files(out: Path, ranks: int) -> None:
    for name, what in (
        ("rank_module.py", "the program of every rank; needs autoshard.runtime, not the model's code"),
        ("plan.json", "the plan: autoshard.Plan.from_json reads it"),
        ("plan.html", "the plan as a page: open it in a browser"),
        (f"rank0 … rank{ranks - 1}.safetensors", "every rank's shards of the parameters"),
        ("inputs.json", "shapes and value ranges of the inputs"),
        ("lines.json", "which module each line communicates for: names in profiles"),
    ):
        print(f"{out / name}  {what}")
    print(f"\nRun it in {ranks} processes, or all ranks in one:")
    folder = "" if shutil.which("torchrun") else f"{Path(sys.executable).parent}/"
    print(f"  {folder}torchrun --nproc-per-node {ranks} {out / 'rank_module.py'} --steps {DEMO_STEPS}")
    print(f"  {folder}python {out / 'rank_module.py'} --steps {DEMO_STEPS}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Errors of the user: a message, status 2."""
    options = _parser().parse_args(argv)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except AutoshardError as error:
        print(f"autoshard: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader closed the pipe: autoshard show … | head
        # else Python complains when it flushes at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a file cannot be written or read
        if error.filename is None:
            raise
        print(f"autoshard: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="autoshard", description="Shard a PyTorch model over a device mesh.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, text in (
        ("plan", _plan_command, "choose layouts and print the plan; needs no weights, any mesh size"),
        ("compile", _compile_command, "write rank_module.py, plan.json and shards to a directory"),
        ("verify", _verify_command, "compare the sharded model with the unsharded one"),
        ("show", _show_command, "print the source, or draw the plan to .html .dot .svg .json .txt"),
        ("explain", _explain_command, "say why a parameter, a module or an operation is laid out as it is"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument(
            "model", metavar="MODEL", help="gpt, llama:8b, …, hf:llama, hf:config.json, or package.module:function"
        )
        mesh = command.add_mutually_exclusive_group(required=True)
        mesh.add_argument("--mesh", help="axes and sizes, for example dp=2,tp=4")
        if name == "plan":
            mesh.add_argument("--devices", type=int, help="how many: the mesh is searched, too")
        else:
            mesh.add_argument(
                "--plan", type=_plan_argument, metavar="FILE", help="follow what `plan --json FILE` wrote, mesh and all"
            )
        command.add_argument("--hardware", default="h100", help=f"one of {', '.join(PRESETS)} (default h100)")
        command.add_argument("--batch", type=int, help="global batch size (default 4, or the function's)")
        command.add_argument("--seq", type=int, help="sequence length (default 32, or the function's)")
        command.add_argument(
            "--hint", action="append", default=[], metavar="PATTERN=HINT", help="colwise, rowwise, replicate, S(0), …"
        )
        command.add_argument(
            "--like", metavar="PLAN", help="a named strategy: fsdp, megatron-sp, …, or dp=fsdp,tp=megatron-sp"
        )
        command.add_argument("--inference", action="store_true", help="no gradients")
        command.add_argument(
            "--micro-batches", type=_micro_batches_argument, default=1, metavar="N", help="a number, or auto"
        )
        ways = ("auto", "none", "blocks", "selective")
        command.add_argument("--recompute", default="auto", choices=ways, help="default: as memory needs")
        command.add_argument("--stages", metavar="AXIS", help="the mesh axis along which the graph is cut into stages")
        command.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b (default), interleaved or zero_bubble")
        command.add_argument("--stages-per-rank", type=int, help="of an interleaved schedule (default: chosen)")
        if name != "verify":
            command.add_argument("--dynamic", action="store_true", help="one program for all batch sizes and lengths")
            _add_planning_options(command)
        if name == "explain":
            command.add_argument("name", metavar="NAME", help="a parameter, an operation, or a pattern of modules")
        if name == "plan":
            command.add_argument("--json", type=Path, help="also write the plan here")
        if name in ("compile", "show"):
            command.add_argument("--out", type=Path, required=name == "compile", help="where to write")
        if name == "verify":
            command.add_argument("--steps", type=int, default=1, help="AdamW steps (default 1)")
            command.add_argument(
                "--dtype",
                choices=("float64", "float32", "bfloat16"),
                help="default float64, and with a plan the model's own",
            )
    shown = commands.add_parser(
        "demo", help="the whole way on a small GPT", description="The whole way on a small GPT."
    )
    shown.set_defaults(run=_demo_command)
    shown.add_argument("--out", type=Path, default=Path("autoshard-demo"), help="where to write (./autoshard-demo)")
    return parser


def _add_planning_options(command: argparse.ArgumentParser) -> None:
    """Options of :func:`autoshard.plan` that not all commands have."""
    command.add_argument("--memory-budget", type=float, metavar="BYTES", help="per rank, at the peak, such as 40e9")
    command.add_argument("--optimizer", default="adamw", help="whose state is counted (default adamw)")
    command.add_argument(
        "--mixed-precision", metavar="DTYPE", help="of gathers and compute, such as bfloat16; sums are in float32"
    )
    command.add_argument("--strict", action="store_true", help="refuse operations without a rule")
    command.add_argument("--objective", default="step", choices=("step", "latency", "throughput"), help="default step")
    command.add_argument("--profile", metavar="CALLS", help="how often each comes, as prefill=1,decode=200")


def _micro_batches_argument(text: str) -> int | str:
    if text != "auto" and not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number, and not auto")
    return text if text == "auto" else int(text)


def _planning_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of :func:`autoshard.plan` from the options."""
    names = "memory_budget optimizer recompute micro_batches strict stages schedule stages_per_rank dynamic".split()
    asked = {name: getattr(options, name) for name in names if hasattr(options, name)}
    if options.mixed_precision is not None:
        dtype = getattr(torch, options.mixed_precision, None)
        if not isinstance(dtype, torch.dtype):
            raise PlanError(f"--mixed-precision {options.mixed_precision!r} is no dtype of torch, such as bfloat16")
        asked["mixed_precision"] = MixedPrecisionPolicy(dtype, torch.float32)
    if hasattr(options, "objective"):
        asked |= {"objective": options.objective, "profile": _profile(options)}
    asked |= {"hints": _hints(options), "like": _like_argument(options), "training": _is_training(options)}
    return asked if _given_plan(options) is None else {**asked, "plan": _given_plan(options)}


def _profile(options: argparse.Namespace) -> dict[str, float] | None:
    if options.profile is None:
        return None
    parts = [part.partition("=") for part in options.profile.split(",")]
    try:
        return {name.strip(): float(times) for name, _, times in parts}
    except ValueError as error:
        raise PlanError(f"--profile {options.profile!r}: write calls and numbers as prefill=1,decode=200") from error


def _plan_argument(path: str) -> Plan:
    try:
        return Plan.from_json(Path(path).read_bytes())
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from error
    except AutoshardError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from error


def _given_plan(options: argparse.Namespace) -> Plan | None:
    """The saved plan to follow, if given."""
    plan: Plan | None = getattr(options, "plan", None)
    if plan is not None and (options.like or options.hint):
        raise PlanError("--plan FILE is followed as it is: leave --like and --hint out, or plan again with them")
    return plan


def _is_training(options: argparse.Namespace) -> bool:
    plan = _given_plan(options)
    return not options.inference if plan is None else plan.training


def _mesh(options: argparse.Namespace) -> Mesh:
    if (plan := _given_plan(options)) is not None:
        return plan.mesh
    axes: dict[str, int] = {}
    for part in options.mesh.split(","):
        name, _, size = part.partition("=")
        if not size.isdigit():
            raise MeshError(f"--mesh {options.mesh!r}: write axes and sizes as dp=2,tp=4")
        if name.strip() in axes:
            raise MeshError(f"--mesh {options.mesh!r}: axis {name.strip()!r} is given twice")
        axes[name.strip()] = int(size)
    return Mesh(axes, options.hardware)


def _hints(options: argparse.Namespace) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for item in options.hint:
        pattern, _, text = item.rpartition("=")
        if not pattern:
            raise HintError(f"--hint {item!r}: write PATTERN=HINT, for example '*.up.weight=S(0)'")
        hints[pattern] = Shard(int(text[2:-1])) if text.startswith("S(") and text[2:-1].isdigit() else text
    return hints


def _like_argument(options: argparse.Namespace) -> str | dict[str, str] | None:
    given: str | None = options.like
    if given is None or "=" not in given:
        return given
    parts = [part.partition("=") for part in given.split(",")]
    if any(not axis or not name for axis, _, name in parts):
        raise PlanError(f"--like {given!r}: write a plan, or axes and plans as dp=fsdp,tp=megatron-sp")
    axes = [axis for axis, _, _ in parts]
    if twice := [axis for axis in axes if axes.count(axis) > 1]:
        raise PlanError(f"--like {given!r}: axis {twice[0]!r} is given twice")
    return {axis: name for axis, _, name in parts}


_COMPILE_WEIGHT_COPIES, _VERIFY_WEIGHT_COPIES = 4.5, 12
"""measured peak memory of ``compile`` and ``verify``, in copies of the weights"""


def _check_memory(make: Callable[[], nn.Module], copies: float, itemsize: int = 0) -> None:
    """Print the memory that a command needs. Raises :class:`PlanError` if the machine has less.

    ``itemsize``: bytes per element, if the command converts the model.
    """
    with torch.device("meta"):
        tensors = [*(model := make()).parameters(), *model.buffers()]
    needed = copies * sum(x.numel() * (itemsize or x.itemsize) for x in tensors)
    free = free_memory()
    if needed > 1e9:
        print(f"this makes weights: about {needed / 1e9:.3g} GB of memory, beside activations", file=sys.stderr)
    if free is not None and needed > free:
        raise PlanError(
            f"the model's weights need about {needed / 1e9:.3g} GB ({copies:g} copies), and this machine has "
            f"{free / 1e9:.3g} GB free. `autoshard plan` and `autoshard show` need no weights."
        )


def _meta_model(options: argparse.Namespace) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    make, args, kwargs = load(options.model, options.batch, options.seq)
    with torch.device("meta"):
        return make().train(_is_training(options)), args, kwargs


def _resulting_plan(options: argparse.Namespace) -> Any:
    """The plan of a model without weights, or the given plan."""
    import autoshard

    if (given := _given_plan(options)) is not None:
        return given
    model, args, kwargs = _meta_model(options)
    if getattr(options, "devices", None) is not None:
        where: dict[str, Any] = {"devices": options.devices, "hardware": options.hardware}
    else:
        where = {"mesh": _mesh(options)}
    return autoshard.plan(model, example_args=args, example_kwargs=kwargs, **where, **_planning_arguments(options))


def _plan_command(options: argparse.Namespace) -> int:
    plan = _resulting_plan(options)
    print(plan)
    if options.json:
        options.json.write_text(plan.to_json(), encoding="utf-8")
        print(f"plan written to {options.json}")
    return 0


def _compile_command(options: argparse.Namespace) -> int:
    import autoshard

    make, args, kwargs = load(options.model, options.batch, options.seq)
    _check_memory(make, _COMPILE_WEIGHT_COPIES)
    torch.manual_seed(0)
    sharded = autoshard.compile(
        make().train(_is_training(options)), _mesh(options), args, kwargs, **_planning_arguments(options)
    )
    sharded.save(options.out)
    ranks = sharded.mesh.size
    step = ", step.json" if (options.out / "step.json").exists() else ""
    print(f"{options.out}: rank_module.py, plan.json, inputs.json, lines.json{step} and {ranks} shards. Run it with:")
    print(f"  torchrun --nproc-per-node {ranks} {options.out}/rank_module.py")
    return 0


def _verify_command(options: argparse.Namespace) -> int:
    import autoshard

    make, args, kwargs = load(options.model, options.batch, options.seq)
    name = options.dtype or ("float64" if options.plan is None else None)  # a plan has dtypes
    dtype = None if name is None else getattr(torch, name)
    _check_memory(make, _VERIFY_WEIGHT_COPIES, 0 if dtype is None else dtype.itemsize)
    torch.manual_seed(0)
    model = make().train(_is_training(options))
    if dtype is not None:
        model = model.to(dtype)
        args, kwargs = torch.utils._pytree.tree_map(
            lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, (args, kwargs)
        )
    names = "steps micro_batches recompute stages schedule stages_per_rank".split()
    asked = {name: getattr(options, name) for name in names}
    asked |= {"plan": options.plan, "hints": _hints(options), "like": _like_argument(options)}
    report = autoshard.verify(model, _mesh(options), args, kwargs, **asked)
    print(report)
    return 0 if report.ok else 1


def _show_command(options: argparse.Namespace) -> int:
    if options.out is None:
        print(_generated_source(options))
    else:
        _resulting_plan(options).visualize(options.out)
        print(f"written to {options.out}")
    return 0


def _generated_source(options: argparse.Namespace) -> str:
    """The generated source for a model without weights."""
    from autoshard.api import compile_for_mesh

    model, args, kwargs = _meta_model(options)
    return str(compile_for_mesh(model, _mesh(options), args, kwargs, **_planning_arguments(options)).source.text)


def _explain_command(options: argparse.Namespace) -> int:
    print(_resulting_plan(options).explain(options.name))
    return 0


def _demo_command(options: argparse.Namespace) -> int:
    return demo(options.out)


if __name__ == "__main__":
    sys.exit(main())
