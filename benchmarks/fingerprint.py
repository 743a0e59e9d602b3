"""Fingerprints of plans: what over 200 (model, mesh, setting) pairs compile to, to be compared before and after a change.

    python benchmarks/fingerprint.py --out before.jsonl             # --jobs 2: in two processes
    python benchmarks/fingerprint.py --compare before.jsonl after.jsonl --ignore text

One JSON line per pair, sorted by key. Two runs of the same code write the same bytes. The fields:

    cost, bound, peak   predicted seconds of a step, their lower bound, peak memory in bytes
    steps               micro-batches, stage boundaries, schedule, ranks of the zigzag order of the sequence
    layouts             parameter, buffer or input → layout; outputs in order
    choices             hash of the strategy of every operation
    collectives         "kind axes phase" → [count, bytes per rank], per step
    text                hash of the generated source as it is
    code                hash of the source without comments and docstrings, its variables numbered
    structure           the same with every name numbered but those of torch: renaming runtime functions keeps it
    error               the class and first line of the error, if the pair does not compile

A renamed word in comments changes ``text`` alone; renamed functions of the runtime change ``code``, too. ``--compare``
exits with status 1 if a field differs that is not ignored.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import io
import itertools
import json
import keyword
import multiprocessing
import os
import sys
import time
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.extend(str(Path(__file__).parents[1] / "tests" / "support" / inner) for inner in (".", "models"))

import torch
from harness import SLOW_LINK, captured_once
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers_models import families

import autoshard
from autoshard import models
from autoshard.api import compile_for_mesh
from autoshard.hardware import PRESETS
from autoshard.layout import Replicate, Shard
from autoshard.models import by_name

Fields = dict[str, Any]
Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""a model, its arguments and keyword arguments"""

IDEAL, SLOW, H100 = PRESETS["ideal_network"], SLOW_LINK, PRESETS["h100"]
"""communication is free; it takes as long as small products do; it is a real machine's"""

OURS = ("mlp", "gpt", "llama", "moe", "dlrm", "vit")
BY_NAME = ("hf:qwen2", "hf:qwen3")
LARGE = {
    "gpt:xl": (8, 1024), "llama:1b": (8, 4096), "llama:8b": (16, 4096), "moe:8x7b": (16, 2048),
    "dlrm:terabyte": (2048, 0), "vit:huge": (64, 0),
}  # fmt: skip
"""model → batch, sequence; on the meta device"""
LAYERS = 4
"""of large models: equal layers are planned as one"""

TIGHT = "tight"
"""in place of a memory budget: :data:`SHARE` of the peak of the same pair without a budget"""
SHARE = 0.9
DEVICES = "devices"
"""in place of a mesh: the mesh is searched, and nothing is generated"""


class Pair(NamedTuple):
    """One compilation. ``axes``: of the mesh, or ``{DEVICES: count}``."""

    model: str
    axes: dict[str, int]
    hardware: autoshard.Hardware
    options: dict[str, Any]

    @property
    def key(self) -> str:
        mesh = ",".join(f"{axis}={size}" for axis, size in self.axes.items())
        given = " ".join(f"{name}={_said(value)}" for name, value in self.options.items())
        return f"{self.model} | {mesh} {self.hardware.name} | {given or 'default'}"


def _said(value: Any) -> str:
    return "bfloat16" if isinstance(value, MixedPrecisionPolicy) else str(value)


def pairs() -> Iterator[Pair]:
    """Every pair, those of one model together."""
    found = [*_each_family(), *_strategies(), *_schedules(), *_memory(), *_serving(), *_settings(), *_large()]
    yield from sorted({pair.key: pair for pair in found}.values(), key=lambda pair: pair.model)


def _each_family() -> Iterator[Pair]:
    """One, two and three axes, even and uneven, training and inference."""
    for name in (*OURS, *BY_NAME, *families()):
        yield Pair(name, {"tp": 2}, IDEAL, {})
        yield Pair(name, {"dp": 2, "tp": 2}, SLOW, {})
        yield Pair(name, {"x": 3}, IDEAL, {})
    for name in (*OURS, "bert", "phi3", "olmoe"):
        yield Pair(name, {"tp": 3}, IDEAL, {"training": False})
    for name in (*OURS, "bert"):
        yield Pair(name, {"dp": 2, "tp": 2, "sp": 2}, IDEAL, {})
        yield Pair(name, {"dp": 3, "tp": 2}, SLOW, {"optimizer": "sgd"})


def _strategies() -> Iterator[Pair]:
    """Strategies by name: data, tensor, sequence and expert parallelism, placements of tables."""
    for like in ("ddp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "megatron-sp", "ulysses", "ring", "replicate"):
        yield Pair("gpt", {"x": 4}, SLOW, {"like": like})
    both = {"dp": "fsdp", "tp": "megatron-sp"}
    for name in ("llama", "t5", "mixtral", "vit"):
        yield Pair(name, {"dp": 2, "tp": 2}, SLOW, {"like": both})
    for name in ("llama", "mistral", "bloom", "gemma3"):  # orders of the sequence
        yield Pair(name, {"cp": 4}, SLOW, {"like": "ring"})
        yield Pair(name, {"cp": 2, "tp": 2}, IDEAL, {"like": {"cp": "ring", "tp": "megatron"}})
    for name in ("moe", "mixtral", "deepseek_v3", "qwen3", "gpt-oss", "olmoe"):
        yield Pair(name, {"ep": 2}, IDEAL, {"like": "expert"})
        yield Pair(name, {"dp": 2, "ep": 2}, SLOW, {"like": {"dp": "ddp", "ep": "expert"}})
    for like in ("table-wise", "row-wise", "column-wise"):
        yield Pair("dlrm", {"x": 4}, SLOW, {"like": like})
        yield Pair("dlrm", {"dp": 2, "x": 2}, IDEAL, {"like": {"dp": "ddp", "x": like}})


def _schedules() -> Iterator[Pair]:
    """Stages and micro-batches."""
    for schedule in ("1f1b", "gpipe", "interleaved", "zero_bubble"):
        yield Pair("gpt", {"pp": 2}, SLOW, {"stages": "pp", "schedule": schedule, "micro_batches": 4})
    for name in ("llama", "t5", "bert", "mixtral", "vit"):
        yield Pair(name, {"pp": 2, "tp": 2}, SLOW, {"stages": "pp", "micro_batches": 2})
    for name in ("gpt", "llama", "moe", "dlrm", "vit", "whisper"):
        yield Pair(name, {"dp": 2}, SLOW, {"micro_batches": 2})
        yield Pair(name, {"dp": 2, "tp": 2}, SLOW, {"micro_batches": "auto"})


def _memory() -> Iterator[Pair]:
    """Tight budgets and recomputation."""
    for name in ("mlp", "gpt", "llama", "moe"):
        yield Pair(name, {"x": 2}, SLOW, {"memory_budget": TIGHT})
    for axes in ({"dp": 2, "tp": 2}, {"x": 3}):
        yield Pair("mlp", axes, SLOW, {"memory_budget": TIGHT, "micro_batches": "auto"})
    for recompute in ("none", "blocks", "selective"):
        for name in ("gpt", "llama"):
            yield Pair(name, {"dp": 2, "tp": 2}, SLOW, {"recompute": recompute})


def _serving() -> Iterator[Pair]:
    yield Pair("llama", {"tp": 2}, H100, {"training": False, "like": "megatron", "dynamic": True})
    for name in ("llama", "gpt2", "mixtral", "gemma2"):
        for asked in ({"objective": "latency"}, {"objective": "throughput"}, {"profile": {"prefill": 1, "decode": 50}}):
            yield Pair(name, {"tp": 2}, IDEAL, {"training": False, **asked})


def _settings() -> Iterator[Pair]:
    bfloat16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    hints = {"*0*weight": Shard(0), "*1*weight": {"tp": Replicate()}}
    yield Pair("gpt", {"dp": 2, "tp": 2}, SLOW, {"dynamic": True})
    for name in ("gpt", "llama", "bert"):
        yield Pair(name, {"dp": 2, "tp": 2}, SLOW, {"mixed_precision": bfloat16})
        yield Pair(name, {"dp": 2}, SLOW, {"inputs": "local"})
        yield Pair(name, {"tp": 2}, IDEAL, {"hints": hints})
        yield Pair(name, {"tp": 2}, IDEAL, {"gather_outputs": True, "training": False})


def _large() -> Iterator[Pair]:
    for name in LARGE:
        yield Pair(name, {"dp": 2, "tp": 8}, H100, {})
    yield Pair("gpt:xl", {"node": 2, "x": 8}, H100, {"memory_budget": TIGHT})
    for name in ("gpt:xl", "llama:8b"):
        yield Pair(name, {"dp": 4, "tp": 3}, H100, {"like": {"dp": "fsdp"}})
        yield Pair(name, {"pp": 2, "tp": 4}, H100, {"stages": "pp", "micro_batches": 4})
        yield Pair(name, {DEVICES: 8}, H100, {})
        yield Pair(name, {DEVICES: 4}, H100, {"training": False, "objective": "latency"})


def made(name: str) -> Made:
    """The model and its inputs, from a fixed seed."""
    torch.manual_seed(0)
    if name in OURS:
        reference = models.get(name)
        return reference.model(), *reference.inputs(batch=4)
    if name in LARGE:
        return _without_data(name, *LARGE[name])
    if name in BY_NAME:
        make, args, kwargs = by_name.load(name, None, None)
        return make().train(), args, kwargs
    import transformers

    case = families()[name]
    kind = getattr(transformers, case.model)
    return kind(kind.config_class(**case.config)).train(), (), case.inputs()


def _without_data(name: str, batch: int, seq: int) -> Made:
    """A large model of :mod:`autoshard.models` on the meta device, of few layers, in bfloat16."""
    family, _, size = name.partition(":")
    module = getattr(models, family)
    config = module.SIZES[size]()
    if hasattr(config, "layers") and isinstance(config.layers, int):
        config = dataclasses.replace(config, layers=LAYERS)
    with torch.device("meta"):
        model: nn.Module = getattr(models, family.capitalize())(config)
    args, kwargs = module.example_inputs(config, batch, seq)
    cast = [x.bfloat16() if x.is_floating_point() else x for x in args]
    return model.bfloat16(), tuple(cast), kwargs


def fingerprint(pair: Pair, model: nn.Module, args: Any, kwargs: Any) -> Fields:
    """The fields of one pair."""
    options = dict(pair.options)
    try:
        if options.get("memory_budget") == TIGHT:
            free = {**options, "memory_budget": float("inf"), "micro_batches": 1}
            peak = autoshard.plan(model, autoshard.Mesh(pair.axes, pair.hardware), args, kwargs, **free).memory.peak
            options["memory_budget"] = int(SHARE * peak)
        if DEVICES in pair.axes:
            plan = autoshard.plan(
                model, None, args, kwargs, devices=pair.axes[DEVICES], hardware=pair.hardware, **options
            )
            return of_plan(plan)
        mesh = autoshard.Mesh(pair.axes, pair.hardware)
        if pair.model in LARGE:  # without weights, which the machine may have no memory for
            compiled = compile_for_mesh(model, mesh, args, kwargs, **options)
            return {**of_plan(compiled.plan), **of_source(compiled.source.text)}
        sharded = autoshard.compile(model, mesh, args, kwargs, **options)
        return {**of_plan(sharded.plan), **of_source(sharded.source)}
    except Exception as error:  # a pair that raises is compared, too, and does not end the run
        return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}


def of_plan(plan: autoshard.Plan) -> Fields:
    """Every field that is read off the plan."""
    count, size = Counter[str](), Counter[str]()
    for c in plan.collectives:
        kind = f"{c.kind} {','.join(c.axes)} {c.phase}"
        count[kind] += c.times
        size[kind] += c.bytes  # type: ignore[assignment]  # a float
    staged = plan.staged
    layouts = {name: str(layout) for name, layout in sorted(plan.layouts.items())}
    choices = [(name, choice.op, choice.labels) for name, choice in plan.choices.items()]
    return {
        "cost": plan.cost.total_s,
        "bound": plan.lower_bound,
        "peak": plan.memory.peak,
        "steps": [
            str(plan.mesh), plan.micro_batches, *([staged.schedule, *staged.boundaries] if staged else []), plan.folded
        ],
        "layouts": {**layouts, "outputs": [str(layout) for layout in plan.outputs]},
        "choices": _hash(str(choices)),
        "collectives": {kind: [count[kind], size[kind]] for kind in sorted(count)},
    }  # fmt: skip


def of_source(text: str) -> Fields:
    """Hashes of a generated file."""
    code, structure = normalised(text)
    return {"text": _hash(text), "code": _hash(code), "structure": _hash(structure)}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING)
TORCH = ("torch", "F", "aten")
"""whose attributes say what is computed"""


def normalised(text: str) -> tuple[str, str]:
    """The source without comments and docstrings, names numbered: those of variables; and all but torch's."""
    code, structure = list[str](), list[str]()
    own, every = dict[str, str](), dict[str, str]()
    names, begins, before, of_torch, outer = _bound(text), True, "", False, ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in SKIPPED or (begins and token.type == tokenize.STRING):
            continue
        begins = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        said = (tokenize.tok_name[token.type], "") if begins else ("", token.string)
        word = "".join(said)
        if token.type == tokenize.NAME and not keyword.iskeyword(word):
            of_torch = (of_torch and before == ".") or (word in TORCH and before != ".")
            numbered = word if of_torch else every.setdefault("." * (before == ".") + word, f"n{len(every)}")
            structure.append(numbered)
            variable = word in names and (before != "." or outer == "self")
            code.append(own.setdefault(word, f"v{len(own)}") if variable else word)
            outer = word
        else:
            code.append(word)
            structure.append(word)
        before = word
    return " ".join(code), " ".join(structure)


def _bound(text: str) -> set[str]:
    """Names that the file gives to values, functions, classes and attributes of ``self``."""
    found = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return found - {*TORCH, "self"}


def of_models(names: Iterable[str]) -> dict[str, Fields]:
    """Key → fields of every pair of these models; each model is captured once for all meshes."""
    torch.set_num_threads(1)
    found = {}
    for name, group in itertools.groupby(pairs(), key=lambda pair: pair.model):
        if name not in names:
            continue
        with captured_once():
            model, args, kwargs = made(name)
            for pair in group:
                begun = time.process_time()
                found[pair.key] = fingerprint(pair, model, args, kwargs)
                print(f"{time.process_time() - begun:6.2f} s  {pair.key}", file=sys.stderr, flush=True)
    return found


def _one(name: str) -> dict[str, Fields]:
    return of_models([name])


def collect(names: list[str], jobs: int) -> dict[str, Fields]:
    """Key → fields, in ``jobs`` processes."""
    if jobs == 1:
        return of_models(names)
    found = {}
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for part in pool.imap_unordered(_one, names):
            found |= part
    return found


def write(found: dict[str, Fields], out: Path) -> None:
    lines = (json.dumps({"key": key, **found[key]}, sort_keys=True, ensure_ascii=False) for key in sorted(found))
    out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read(path: Path) -> dict[str, Fields]:
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {line.pop("key"): line for line in lines}


def differences(
    before: dict[str, Fields], after: dict[str, Fields], ignored: Iterable[str] = ()
) -> dict[str, list[str]]:
    """Field → a line for each pair in which it differs. Pairs that only one side has stand under "pairs"."""
    found: dict[str, list[str]] = {}
    if one := sorted(before.keys() ^ after.keys()):
        found["pairs"] = [f"{key}: only {'before' if key in before else 'after'}" for key in one]
    for key in sorted(before.keys() & after.keys()):
        a, b = before[key], after[key]
        for field in sorted({*a, *b} - {*ignored}):
            if a.get(field) != b.get(field):
                found.setdefault(field, []).append(f"{key}: {_change(a.get(field), b.get(field))}")
    return found


def _change(a: Any, b: Any) -> str:
    if isinstance(a, dict) and isinstance(b, dict):
        names = [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        return "; ".join(f"{name}: {a.get(name)} → {b.get(name)}" for name in names[:4]) + more
    if isinstance(a, float) and isinstance(b, float) and a:
        return f"{a:.6g} → {b:.6g} ({(b - a) / a:+.2e})"
    return f"{a} → {b}"


def compare(before: Path, after: Path, ignored: Iterable[str], tell: Callable[[str], None] = print) -> int:
    """Prints what differs, field by field; 1 if anything does."""
    old, new = read(before), read(after)
    found = differences(old, new, ignored)
    for field, lines in found.items():
        tell(f"{field}: {len(lines)} of {len(old.keys() | new.keys())} pairs")
        for line in lines:
            tell(f"  {line}")
    if not found:
        tell(f"{len(old)} pairs, no difference")
    return int(bool(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the file to write; default: print a summary only")
    parser.add_argument("--models", default="", help="of these models alone, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="of two files")
    parser.add_argument(
        "--ignore", nargs="*", default=[], metavar="FIELD", help="of a comparison: fields that may differ"
    )
    options = parser.parse_args()
    if options.compare:
        sys.exit(compare(*options.compare, options.ignore))
    if os.environ.get("PYTHONHASHSEED") != "0":  # some models walk through sets of strings
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    begun = time.perf_counter()
    known = list(dict.fromkeys(pair.model for pair in pairs()))
    found = collect(options.models.split(",") if options.models else known, options.jobs)
    if options.out:
        write(found, options.out)
    refused = sum("error" in fields for fields in found.values())
    print(f"{len(found)} pairs, of which {refused} raise, in {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
