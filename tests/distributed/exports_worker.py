"""One rank of a gloo world that runs exported torch source beside the plan; started by test_exports_gloo.py."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from checks import assert_close, main
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard.models import Llama, LlamaConfig


class LanguageModel(nn.Module):
    """Mean cross entropy of a tiny Llama, whose logits have float64."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Llama(LlamaConfig.tiny())

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(ids).logits.flatten(0, 1), labels.flatten())


class SentBytes(TorchDispatchMode):
    """Bytes that a rank sends in collectives, of rings."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # what it calls comes here, too
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and any(n in str(func) for n in ("gather", "reduce")):
            tensors = [x for x in pytree.tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
            size = max(x.numel() * x.element_size() for x in tensors)
            self.total += (1 + ("gather" not in str(func) and "scatter" not in str(func))) * size / 2
        return result


def written(plan: autoshard.Plan, name: str) -> SimpleNamespace:
    """The names of the exported source."""
    path = Path(sys.argv[2]).parent / f"{name}_{dist.get_rank()}.py"
    path.write_text(plan.export("torch").files["parallelize.py"])
    return SimpleNamespace(**runpy.run_path(str(path)))


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def shards(model: nn.Module) -> dict[str, torch.Size]:
    """Shapes of what a rank holds of parameters."""
    return {n: (p.to_local() if isinstance(p, DTensor) else p).shape for n, p in model.named_parameters()}


def case(name: str, like: dict[str, str], options: dict[str, Any]) -> None:
    """Losses and gradients of the exported source, of the plan and of one device; layouts of parameters; bytes."""
    torch.manual_seed(0)
    sizes = dict.fromkeys(like, 2)
    model = LanguageModel().double()
    ids, labels = torch.randint(0, LlamaConfig.tiny().vocab, (2, 8, 32))
    mesh = autoshard.Mesh(sizes, "h100")
    ours = autoshard.compile(copy.deepcopy(model), mesh, (ids, labels), like=like, **options)
    source = written(ours.plan, name)
    device_mesh = source.make_mesh("cpu")
    theirs = source.parallelize(copy.deepcopy(model), device_mesh)
    rows = slice(None)
    if "dp" in sizes:
        rank = device_mesh["dp"].get_local_rank()
        rows = slice(4 * rank, 4 * rank + 4)
    in_loss = "loss_parallel" in (source.__doc__ or "")
    with SentBytes() as sent, loss_parallel() if in_loss else contextlib.nullcontext():
        loss = theirs(ids[rows], labels[rows])
        loss.backward()
    model(ids, labels).backward()
    ours(ids, labels).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    found = {n: full(p.grad) for n, p in theirs.named_parameters()}
    assert_close(found, expected, "gradient of the exported source")
    assert_close({n: full(p.grad) for n, p in ours.named_parameters()}, expected, "gradient of the plan")
    assert shards(theirs) == shards(ours)
    again = [c.bytes for c in ours.plan.collectives if c.phase == "backward" and "recomputed" in c.reason]
    assert bool(again) == (
        "gathers again" in " ".join(ours.plan.export("torch").unsaid)
    )  # torch keeps what it gathered
    planned = sum(c.bytes for c in ours.plan.collectives) - sum(again)
    assert sent.total == pytest.approx(planned, rel=0.1), (sent.total, planned, sum(again))


def tiny_llama() -> Any:
    """Of transformers, in float64."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "use_cache": False}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).double()


def transformers_case(name: str, like: dict[str, str]) -> None:
    """What ``from_pretrained`` makes of the exported ``DistributedConfig``: logits, loss and gradients of one device."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    loaded = functools.partial(
        transformers.AutoModelForCausalLM.from_pretrained, Path(sys.argv[2]).parent, dtype=torch.float64
    )
    model = loaded().train()
    ids = torch.randint(0, 64, (4, 8))
    batch = {"input_ids": ids, "labels": ids}
    ours = autoshard.compile(copy.deepcopy(model), autoshard.Mesh(dict.fromkeys(like, 2), "h100"), (), batch, like=like)
    config = json.loads(ours.plan.export("transformers").files["distributed_config.json"])
    distributed = transformers.distributed.DistributedConfig(**config)
    theirs = loaded(distributed_config=distributed).train()
    expected, found = model(**batch), theirs(**batch)
    expected.loss.backward()
    found.loss.backward()
    assert_close(
        {"logits": full(found.logits), "loss": full(found.loss)}, {n: expected[n] for n in ("logits", "loss")}, name
    )
    gradients = {n: full(p.grad) for n, p in theirs.named_parameters()}
    assert_close(gradients, {n: p.grad for n, p in model.named_parameters()}, "gradient")
    if like != {"dp": "ddp"}:
        assert any(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in theirs.parameters())
    if "tp" in like:
        assert shards(theirs) == shards(ours)


OF_TRANSFORMERS = {
    f"transformers_{like}": {axis: like} for axis, like in (("tp", "megatron"), ("dp", "fsdp"), ("dp", "ddp"))
}

CASES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "ddp": ({"dp": "ddp"}, {}),
    "fsdp": ({"dp": "fsdp"}, {}),
    "zero1": ({"dp": "zero1"}, {}),
    "megatron": ({"tp": "megatron"}, {}),
    "megatron_sp": ({"tp": "megatron-sp"}, {}),
    "recomputed": ({"dp": "fsdp"}, {"recompute": "blocks"}),
    "selective": ({"dp": "fsdp"}, {"recompute": "selective"}),
    "fsdp_megatron": ({"dp": "fsdp", "tp": "megatron"}, {}),
    "fsdp_megatron_sp": ({"dp": "fsdp", "tp": "megatron-sp"}, {}),
}

if __name__ == "__main__":
    of_source = {name: functools.partial(case, name, *options) for name, options in CASES.items()}
    main(of_source | {name: functools.partial(transformers_case, name, x) for name, x in OF_TRANSFORMERS.items()})
