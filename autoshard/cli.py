"""Command line: ``autoshard plan|compile|verify|show|explain|project MODEL --mesh dp=2,tp=4``, ``demo``, ``completion``."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import __version__ as torch_version
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoshard
from autoshard import models
from autoshard.check.verification import VERIFY_OPTIONS
from autoshard.completion import SHELLS, completion_script
from autoshard.errors import AutoshardError, HintError, MeshError, PlanError
from autoshard.exports import KINDS, read_configuration
from autoshard.hardware import PRESETS, free_memory
from autoshard.hardware import hardware as resolve_hardware
from autoshard.layout import Shard
from autoshard.mesh import Mesh
from autoshard.models.by_name import LoadedModel, load
from autoshard.passes.ir.text import show_bytes, show_seconds
from autoshard.passes.pipeline.schedules import SCHEDULES
from autoshard.passes.propagate.named_strategies.strategies import STRATEGY_NAMES
from autoshard.plans.options import OFFLOADS
from autoshard.plans.plan import Plan


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


EXAMPLES = {
    "plan": """
  autoshard plan gpt:small --mesh dp=4,tp=2 --hardware h100 --batch 32 --seq 256
  autoshard plan llama:8b --mesh dp=2,tp=8 --hardware h100 --batch 8 --seq 2048 --like dp=fsdp,tp=megatron-sp
  autoshard plan llama:1b --devices 8 --hardware h100 --batch 16 --seq 1024 --memory-budget 40GB --out plan.html
  autoshard plan mlp --mesh tp=2 --dtype float32 --json plan.json
  autoshard plan llama:8b --mesh dp=2,tp=8 --hardware h100 --export megatron --export torch=parallel""",
    "compare": """
  autoshard compare llama:8b --devices 8 --hardware h100 --batch 8 --seq 2048 --like megatron-flags.txt
  autoshard compare gpt:small --mesh dp=8 --hardware h100 --batch 32 --seq 256 --like deepspeed.json""",
    "compile": """
  autoshard compile gpt --mesh tp=2 --hardware ideal_network --out gpt-tp2
  torchrun --nproc-per-node 2 gpt-tp2/rank_module.py""",
    "verify": """
  autoshard verify hf:llama --mesh tp=2 --hardware ideal_network
  autoshard verify moe --mesh ep=2 --like expert""",
    "show": """
  autoshard show mlp --mesh tp=2 --hardware ideal_network
  autoshard show gpt --mesh dp=2,tp=2 --out plan.html""",
    "explain": """
  autoshard explain gpt head.weight --mesh dp=2,tp=2 --hardware ideal_network
  autoshard explain mlp 'blocks.*' --mesh tp=2""",
    "project": """
  autoshard project llama:8b --devices 64,512,4096 --mesh dp=8,tp=8 --hardware h100 --batch 64 --seq 4096
  autoshard project gpt --devices 8,64 --hardware h100 --batch 32 --seq 256 --anchor 0.12""",
    "demo": """
  autoshard demo --out autoshard-demo""",
    "completion": """
  eval "$(autoshard completion bash)"                                   # in ~/.bashrc
  autoshard completion fish > ~/.config/fish/completions/autoshard.fish""",
}
"""command → lines for its help"""


def _parser() -> argparse.ArgumentParser:
    examples = "".join(EXAMPLES[name].split("\n")[1] + "\n" for name in ("plan", "verify", "show", "demo"))
    parser = argparse.ArgumentParser(
        prog="autoshard",
        description="Shard a PyTorch model over a device mesh.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"examples:\n{examples}\n`autoshard COMMAND --help` has the options and examples of a command.",
    )
    parser.add_argument(
        "--version", action="version", version=f"autoshard {autoshard.__version__}, torch {torch_version}"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=f"examples:{EXAMPLES[name]}",
        )
        command.set_defaults(run=run)
        return command

    for name, run, text in (
        ("plan", _plan_command, "choose layouts and print the plan; needs no weights, any mesh size"),
        ("compile", _compile_command, "write rank_module.py, plan.json and shards to a directory"),
        ("verify", _verify_command, "compare the sharded model with the unsharded one"),
        ("show", _show_command, "print the source, or draw the plan to .html .dot .svg .json .txt"),
        ("explain", _explain_command, "explain the layout of a parameter, a module or an operation"),
        ("compare", _compare_command, "price the configuration of another engine with the plan of a search"),
        ("project", _project_command, "print a table over numbers of devices: step, tokens/s, MFU, device hours"),
    ):
        command = add(name, run, text)
        command.add_argument(
            "model",
            metavar="MODEL",
            help=f"{', '.join(models.names())}; hf:FAMILY or hf:config.json (transformers); package.module:function",
        )
        mesh: Any = command if name == "project" else command.add_mutually_exclusive_group(required=True)
        mesh.add_argument("--mesh", metavar="AXES", help="axes and sizes, for example dp=2,tp=4")
        if name == "project":
            command.add_argument(
                "--devices",
                type=_numbers_argument,
                metavar="N,N",
                default=(512, 2048, 8192),
                help="default 512,2048,8192",
            )
            command.add_argument(
                "--anchor",
                metavar="SECONDS",
                help="a step measured on the first number, or the file of a calibrated node",
            )
        elif name in ("plan", "compare"):
            mesh.add_argument("--devices", type=int, metavar="N", help="how many: the mesh is searched, too")
        else:
            mesh.add_argument(
                "--plan", type=_plan_argument, metavar="FILE", help="use plan and mesh of a file by `plan --json FILE`"
            )
        command.add_argument(
            "--hardware",
            metavar="NAME",
            help=f"{', '.join(PRESETS)}, or a file of Hardware.save (default: this machine's GPU, else cpu)",
        )
        command.add_argument("--batch", type=int, metavar="N", help="global batch size (default 4, or the function's)")
        command.add_argument("--seq", type=int, metavar="N", help="sequence length (default 32, or the function's)")
        verified = "float64, and with --plan that of the plan"
        command.add_argument(
            "--dtype",
            choices=DTYPES,
            help=f"of the model and its inputs (default: {verified if name == 'verify' else 'bfloat16 on GPUs, else float32'})",
        )
        command.add_argument(
            "--hint", action="append", default=[], metavar="PATTERN=HINT", help="colwise, rowwise, replicate, S(0), …"
        )
        configured = "or a file: DeepSpeed JSON, Megatron-LM flags, torchtitan TOML, …"
        command.add_argument(
            "--like",
            metavar="PLAN",
            required=name == "compare",
            help=f"a named strategy: fsdp, megatron-sp, …, or dp=fsdp,tp=megatron-sp; {configured}",
        )
        command.add_argument("--inference", action="store_true", help="plan without a backward")
        command.add_argument(
            "--micro-batches", type=_micro_batches_argument, default=1, metavar="N", help="a number, or auto"
        )
        command.add_argument(
            "--loss-chunks",
            type=_micro_batches_argument,
            default="auto",
            metavar="N",
            help="of the rows, or auto (default)",
        )
        ways = ("auto", "none", "blocks", "selective")
        command.add_argument("--recompute", default="auto", choices=ways, help="default: as memory needs")
        command.add_argument("--offload", choices=OFFLOADS, help="to host memory (default: nothing)")
        command.add_argument("--stages", metavar="AXIS", help="the mesh axis of pipeline stages")
        command.add_argument(
            "--schedule", default="1f1b", metavar="NAME", help="gpipe, 1f1b (default), interleaved or zero_bubble"
        )
        command.add_argument(
            "--stages-per-rank", type=int, metavar="N", help="of an interleaved schedule (default: chosen)"
        )
        if name != "verify":
            command.add_argument("--dynamic", action="store_true", help="one program for all batch sizes and lengths")
            _add_planning_options(command)
        if name == "explain":
            command.add_argument("name", metavar="NAME", help="a parameter, an operation, or a pattern of modules")
        if name in ("plan", "project"):
            command.add_argument(
                "--time-limit", type=float, metavar="SECONDS", help="end the search then, with the best plan so far"
            )
        if name == "plan":
            command.add_argument("--json", type=Path, metavar="FILE", help="also write the plan here, for --plan FILE")
            command.add_argument("--compare", action="store_true", help="plan the named strategies, too")
            command.add_argument("--full", action="store_true", help="print every table and row")
            command.add_argument(
                "--export",
                action="append",
                default=[],
                metavar="KIND[=FOLDER]",
                help=f"write the configuration of another engine to a folder, or print it: {', '.join(KINDS)}",
            )
        if name in ("plan", "compile", "show"):
            where = "draw the plan to .html .dot .svg .json .txt" if name == "plan" else "where to write"
            command.add_argument("--out", type=Path, metavar="PATH", required=name == "compile", help=where)
        if name == "verify":
            command.add_argument("--steps", type=int, default=1, metavar="N", help="AdamW steps (default 1)")
    shown = add("demo", _demo_command, "plan an 8B model for 8 H100; verify and train a tiny one")
    shown.add_argument(
        "--out", type=Path, default=Path("autoshard-demo"), metavar="PATH", help="default autoshard-demo"
    )
    script = add("completion", _completion_command, "print a script that completes commands and options in a shell")
    script.add_argument("shell", choices=SHELLS, help="zsh after `autoload -U bashcompinit; bashcompinit`")
    return parser


def _add_planning_options(command: argparse.ArgumentParser) -> None:
    """Options of :func:`autoshard.plan` that not all commands have."""
    command.add_argument(
        "--memory-budget",
        type=_bytes_argument,
        metavar="SIZE",
        help="per rank, at the peak, such as 40GB, 512MiB or 40e9",
    )
    command.add_argument("--optimizer", default="adamw", metavar="NAME", help="whose state is counted (default adamw)")
    command.add_argument(
        "--mixed-precision",
        choices=DTYPES[2:],
        help="of gathers and compute; parameters and sums of gradients stay in float32",
    )
    command.add_argument("--strict", action="store_true", help="refuse operations without a rule")
    command.add_argument("--objective", default="step", choices=("step", "latency", "throughput"), help="default step")
    command.add_argument("--profile", metavar="CALLS", help="frequency of each call, as prefill=1,decode=200")


DTYPES = ("float64", "float32", "bfloat16", "float16")

BYTE_UNITS = {
    "": 1,
    **{f"{k}b": 10 ** (3 * n) for n, k in enumerate(("", *"kmgt"))},
    **{f"{k}ib": 1024**n for n, k in enumerate("kmgt", 1)},
}
"""unit in small letters → bytes"""


def _bytes_argument(text: str) -> float:
    """Bytes of a size such as 40GB, 512 MiB or 40e9."""
    found = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)\s*([a-z]*)", text.strip().lower())
    try:
        if found is not None and found[2] in BYTE_UNITS:
            return float(found[1]) * int(BYTE_UNITS[found[2]])
    except ValueError:  # 1.2.3
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 40GB, 512MiB or 40e9")


def _numbers_argument(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, such as 64,512")
    return tuple(map(int, parts))


def _micro_batches_argument(text: str) -> int | str:
    if text != "auto" and not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto")
    return text if text == "auto" else int(text)


def _planning_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of :func:`autoshard.plan` from the options."""
    names = (
        "memory_budget optimizer recompute micro_batches loss_chunks strict stages schedule stages_per_rank "
        "dynamic time_limit offload"
    ).split()
    asked = {name: getattr(options, name) for name in names if hasattr(options, name)}
    if options.mixed_precision is not None:
        asked["mixed_precision"] = MixedPrecisionPolicy(getattr(torch, options.mixed_precision), torch.float32)
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
        raise PlanError(f"--profile {options.profile!r}: write calls as prefill=1,decode=200") from error


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
        raise PlanError("--plan FILE fixes all layouts. Leave --like and --hint out, or plan again with them")
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
    if given is None or "=" not in given or Path(given).is_file():
        return given
    parts = [part.partition("=") for part in given.split(",")]
    if any(not axis or not name for axis, _, name in parts):
        raise PlanError(f"--like {given!r}: write a strategy, or axes and strategies as dp=fsdp,tp=megatron-sp")
    axes = [axis for axis, _, _ in parts]
    if twice := [axis for axis in axes if axes.count(axis) > 1]:
        raise PlanError(f"--like {given!r}: axis {twice[0]!r} is given twice")
    return {axis: name for axis, _, name in parts}


_COMPILE_WEIGHT_COPIES, _VERIFY_WEIGHT_COPIES = 4.5, 12
"""measured peak memory of ``compile`` and ``verify``, in copies of the weights"""


def _check_memory(make: Callable[[], nn.Module], copies: float) -> None:
    """Print the memory that a command needs. Raises :class:`PlanError` if the machine has less."""
    with torch.device("meta"):
        tensors = [*(model := make()).parameters(), *model.buffers()]
    needed = copies * sum(x.nbytes for x in tensors)
    free = free_memory()
    if needed > 1e9:
        print(f"the weights need about {needed / 1e9:.3g} GB of memory, in addition to activations", file=sys.stderr)
    if free is not None and needed > free:
        raise PlanError(
            f"the model's weights need about {needed / 1e9:.3g} GB ({copies:g} copies), but this machine "
            f"has {free / 1e9:.3g} GB free. `autoshard plan` and `autoshard show` need no weights."
        )


def _dtype_name(options: argparse.Namespace) -> str:
    """The model's dtype: asked for, of the saved plan's parameters, or of the hardware."""
    if options.dtype is not None:
        return str(options.dtype)
    if (plan := _given_plan(options)) is not None:
        return next((plan.dtypes[n] for n, kind in plan.kinds.items() if kind == "parameter"), "float32")
    if options.command == "verify":
        return "float64"
    kind = resolve_hardware(options.hardware)
    return "bfloat16" if kind.is_accelerator and options.mixed_precision is None else "float32"


def _loaded_model(options: argparse.Namespace) -> LoadedModel:
    """The model of the command in its dtype; a user's function keeps its own unless asked."""
    asked = options.dtype is not None or (options.command == "verify" and options.plan is None)
    return load(options.model, options.batch, options.seq, getattr(torch, _dtype_name(options)), convert=asked)


def _meta_model(options: argparse.Namespace) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    make, args, kwargs = _loaded_model(options)
    with torch.device("meta"):
        return make().train(_is_training(options)), args, kwargs


def _resulting_plan(options: argparse.Namespace) -> Any:
    """The plan of a model without weights, or the given plan."""
    if (given := _given_plan(options)) is not None:
        known = inspect.signature(autoshard.plan).parameters.values()
        asked = [x.name for x in known if getattr(options, x.name, x.default) not in (x.default, None)]
        asked = [name for name in asked if name not in ("model", "mesh", "batch")]
        if asked:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in asked)
            raise PlanError(f"--plan FILE is a finished plan: {named} cannot change it. Plan again without --plan")
        return given
    model, args, kwargs = _meta_model(options)
    if getattr(options, "devices", None) is not None:
        where: dict[str, Any] = {"devices": options.devices, "hardware": options.hardware}
    else:
        where = {"mesh": _mesh(options)}
    plan = autoshard.plan(model, example_args=args, example_kwargs=kwargs, **where, **_planning_arguments(options))
    own = {name: getattr(options, name) for name in ("batch", "seq", "hardware", "like")}
    words = [f"--{name}={value}" for name, value in own.items() if value is not None]
    return replace(plan, asked=(options.model, *(w for w in plan.asked if not w.startswith("--like=")), *words))


def _plan_command(options: argparse.Namespace) -> int:
    plan = _resulting_plan(options)
    if options.compare:
        _ = plan.compared
    print(plan.report("full" if options.full else "short"))
    if options.json:
        options.json.write_text(plan.to_json(), encoding="utf-8")
        print(f"plan written to {options.json}")
    if options.out:
        plan.visualize(options.out)
        print(f"plan drawn to {options.out}")
    for asked in options.export:
        kind, _, folder = asked.partition("=")
        found = plan.export(kind)
        if folder:
            for path in found.write(folder):
                print(f"{kind}: {path}")
            found = replace(found, files={})
        print(found)
    return 0


def _compare_command(options: argparse.Namespace) -> int:
    """Print the step of ``--like``, and of searched plans on this mesh and others."""
    model, args, kwargs = _meta_model(options)
    asked = _planning_arguments(options)
    where: dict[str, Any] = {"devices": options.devices, "hardware": options.hardware}
    if options.devices is None:
        where = {"mesh": _mesh(options)}
    elif read_configuration(asked["like"]) is None:
        raise PlanError(f"--devices needs the file of a configuration, got --like {options.like}. Give --mesh")
    example: dict[str, Any] = {"example_args": args, "example_kwargs": kwargs}
    rows = {options.like: autoshard.plan(model, **example, **where, **asked)}
    free: dict[str, Any] = {**asked, "like": None}
    rows["search, same mesh"] = autoshard.plan(model, rows[options.like].mesh, **example, **free)
    if options.devices is not None:
        rows["search"] = autoshard.plan(model, **example, **where, **free)
    print(f"{'':32} {'mesh':24} {'step':>10} {'peak':>10}  strategy")
    for name, plan in rows.items():
        mesh = ",".join(f"{a}={n}" for a, n in plan.mesh.sizes.items())
        step, peak = show_seconds(plan.cost.total_s), show_bytes(plan.cost.memory_bytes)
        count = f", {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
        print(f"{name[-32:]:32} {mesh:24} {step:>10} {peak:>10}  {plan.like or 'search'}{count}")
    return 0


def _compile_command(options: argparse.Namespace) -> int:
    make, args, kwargs = _loaded_model(options)
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
    make, args, kwargs = _loaded_model(options)
    _check_memory(make, _VERIFY_WEIGHT_COPIES)
    torch.manual_seed(0)
    model = make().train(_is_training(options))
    made = {"hints": _hints(options), "like": _like_argument(options)}
    asked = {name: getattr(options, name) for name in ("steps", *sorted(VERIFY_OPTIONS - made.keys()))} | made
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


def _project_command(options: argparse.Namespace) -> int:
    model, args, kwargs = _meta_model(options)
    mesh = None if options.mesh is None else _mesh(options)
    try:
        anchor: Any = None if options.anchor is None else float(options.anchor)
    except ValueError:
        anchor = options.anchor
    where = {"mesh": mesh, "hardware": options.hardware, "anchor": anchor}
    print(autoshard.project(model, options.devices, args, kwargs, **where, **_planning_arguments(options)))
    return 0


def _completion_command(options: argparse.Namespace) -> int:
    words = {"model": models.names(), "hardware": PRESETS, "like": STRATEGY_NAMES, "schedule": SCHEDULES}
    print(completion_script(_parser(), options.shell, words))
    return 0


def _demo_command(options: argparse.Namespace) -> int:
    from autoshard.demo import demo

    return demo(options.out)


if __name__ == "__main__":
    sys.exit(main())
