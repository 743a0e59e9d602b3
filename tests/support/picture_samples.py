"""Plans for the tests of reports and pictures."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

import autoshard
from autoshard import Invariant, Layout, Mesh, Replicate, Shard, models
from autoshard.hardware import PRESETS
from autoshard.models.llama import Llama, LlamaConfig, example_inputs
from autoshard.plans.plan import Plan
from autoshard.report.record import Choice, Collective, Cost

ODD_NAMES = (
    "</script><script>window.hacked=1</script>",
    "<img src=x onerror='window.hacked=1'>",
    'quo"te\\back\\N',
    "line\nbreak",
    "日本語_слой_🙂",
    "__proto__",
    "[bold]markup[/bold]",
    "x" * 200,
)


@functools.cache
def planned(name: str, **axes: int) -> Plan:
    """The plan of a reference model on a fast network, so that everything is cut."""
    reference = models.get(name)
    with torch.device("meta"):
        model = reference.model()
    args, kwargs = reference.inputs()
    return autoshard.plan(model, Mesh(axes, hardware="ideal_network"), args, kwargs)


@functools.cache
def deep_llama(batch: int = 8) -> Plan:
    """A 12-layer Llama on {dp: 2, tp: 4}, as issue trackers get it; nothing hides, so that equal layers are equal."""
    config = LlamaConfig(vocab=32000, width=2048, hidden=5632, heads=32, kv_heads=4, layers=12)
    with torch.device("meta"):
        model = Llama(config)
    args, kwargs = example_inputs(config, batch=batch, seq=512)
    mesh = Mesh({"dp": 2, "tp": 4}, replace(PRESETS["h100"], overlap=0.0))
    return autoshard.plan(model, mesh, args, kwargs)


def chain(names: tuple[str, ...], per_module: int = 1, rule: bool = True) -> Plan:
    """A made-up plan: one parameter and ``per_module`` linears per module name, each behind an all-gather."""
    mesh = Mesh({"tp": 2})
    whole, cut = Layout(mesh, [Invariant()]), Layout(mesh, {"tp": Shard(0)})
    read = Layout(mesh, [Replicate()])
    layouts, shapes, kinds = {"x": whole}, {"x": (4, 8)}, {"x": "input"}
    choices, collectives, last = {}, [], "x"
    for i, name in enumerate(names):
        weight = f"{name}.weight"
        layouts[weight], shapes[weight], kinds[weight] = cut, (8, 8), "parameter"
        for j in range(per_module):
            op = f"linear_{i}_{j}"
            layouts[op], shapes[op], kinds[op] = whole, (4, 8), "value"
            choices[op] = Choice(
                "aten.linear.default", name, "model.py:1", ("I",), 512.0, 2e-6, rule,
                (last, weight), (op,), (str(whole), str(read)), ((("n",), 1e-6),),
            )  # fmt: skip
            last = op
        step = f"{weight}: {cut} → {read}"
        first = f"linear_{i}_0"
        collectives.append(Collective("all_gather", ("tp",), "forward", 128.0, name, step, weight, 1e-6, first))
        collectives.append(Collective("reduce_scatter", ("tp",), "backward", 128.0, name, step, weight, 1e-6, first))
    collectives.sort(key=lambda c: c.phase == "backward")
    compute, sent = sum(c.seconds for c in choices.values()), sum(c.seconds for c in collectives)
    flops = sum(c.flops for c in choices.values())
    return Plan(
        mesh, layouts, tuple(collectives), Cost(compute, sent, compute + sent, 1e6, flops, flops), choices,
        outputs=(whole,), shapes=shapes, kinds=kinds, title=names[0], modules=dict.fromkeys(names, "Linear"),
        dtypes=dict.fromkeys(shapes, "float32"), differentiable=tuple(shapes),
    )  # fmt: skip
