"""Sharded initialisation: bit for bit what one device gets from the same seed, one full tensor at a time."""

from __future__ import annotations

import copy
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import ideal
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard import models
from autoshard.errors import InitialiseError
from autoshard.initialise.deferred import deferred_init, materialise, recording_of
from autoshard.layout import chunk

ROOT = Path(__file__).parents[2]
OUTSIDE = torch.arange(6.0)


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _differences(fn: Callable[[], nn.Module], seed: int = 7) -> list[str]:
    """Names whose replayed value is not bit for bit the single-device one; the generator must end alike, too."""
    torch.manual_seed(seed)
    expected = _named(fn())
    state = torch.get_rng_state()
    model = deferred_init(fn)
    assert all(t.is_meta for t in _named(model).values())
    values = materialise(model, seed)
    assert expected.keys() <= values.keys()
    bad = [n for n, e in expected.items() if e.dtype != values[n].dtype or not torch.equal(values[n], e)]
    return bad + ([] if torch.equal(state, torch.get_rng_state()) else ["generator"])


@pytest.mark.parametrize("family", ["mlp", "gpt", "llama", "moe", "dlrm", "vit"])
def test_reference_models(family: str) -> None:
    assert _differences(models.get(family).model) == []


@pytest.mark.parametrize("family", ["gpt", "vit"])
def test_reference_models_in_float64(family: str, float64: None) -> None:
    assert _differences(models.get(family).model) == []


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert", "T5", "Mixtral"])
def test_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 131, "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2}
    common = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48, **sizes}
    grouped = {"num_key_value_heads": 2, **common}
    config, head = {
        "Llama": (grouped, "LlamaForCausalLM"),
        "GPT2": ({"n_embd": 32, "n_layer": 2, "n_head": 4, **sizes}, "GPT2LMHeadModel"),
        "Bert": (common, "BertForMaskedLM"),
        "T5": ({"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, **sizes},
               "T5ForConditionalGeneration"),
        "Mixtral": ({"num_local_experts": 4, **grouped}, "MixtralForCausalLM"),
    }[name]  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**config)
    assert _differences(lambda: getattr(transformers, head)(config)) == []


class Oddities(nn.Module):
    """Initialisation in every way that is not one in-place op on a fresh parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.padded = nn.Embedding(7, 5, padding_idx=2)
        self.rows = nn.Parameter(torch.empty(6, 4))
        nn.init.normal_(self.rows.data[1:3])  # the rest stays uninitialised, so zero it below
        self.rows.data[0] = 1.5
        self.rows.data[3:].zero_()
        self.scaled = nn.Parameter(torch.randn(4, 4) / 4**0.5)
        self.halves = nn.Parameter(torch.cat([torch.rand(2, 3), torch.full((2, 3), 0.5)]))
        joint = torch.randn(6, 4)
        self.first, self.second = (nn.Parameter(part) for part in joint.chunk(2))
        self.strided = nn.Parameter(torch.empty(33, 17).t().normal_())
        self.replaced = nn.Parameter(torch.zeros(3))
        self.replaced.data = torch.rand(3)
        self.square = nn.Parameter(nn.init.orthogonal_(torch.empty(8, 5)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(8, 5), 0.5))
        self.tight = nn.Parameter(nn.init.trunc_normal_(torch.empty(40), 0.0, 1.0, 1.5, 2.0))
        self.order = nn.Parameter(torch.randperm(9).float())
        self.coins = nn.Parameter(torch.bernoulli(torch.rand(50)))
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 3)]
        self.rated = nn.Parameter(torch.empty(3).fill_(rates[1]))
        self.masked = nn.Parameter(torch.arange(5.0)[torch.tensor([True, False, True, True, False])])
        self.from_numpy = nn.Parameter(torch.from_numpy(np.arange(4.0)) * 2)
        self.register_buffer("table", torch.tensor([1.0, 2.0]).add_(1))
        self.register_buffer("outside", OUTSIDE.view(2, 3) + 1)
        self.register_buffer("alias", self.table[1:], persistent=False)
        self.low = nn.Parameter(torch.empty(20, dtype=torch.bfloat16).normal_())
        with torch.no_grad():
            self.scaled.mul_(self.rated[0])  # reads a tensor that is changed afterwards
            self.rated.add_(torch.rand(3))


def _modules() -> dict[str, Callable[[], nn.Module]]:
    layer = nn.TransformerEncoderLayer
    return {
        "oddities": Oddities,
        "deep copies": lambda: nn.TransformerEncoder(layer(8, 2, 16), 3, enable_nested_tensor=False),
        "lstm": lambda: nn.LSTM(4, 6, num_layers=2),
        "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 2, 3)),
        "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 7)),
        "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 7)),
        "converted": lambda: nn.Linear(5, 7).half(),
        "converted lstm": lambda: nn.LSTM(4, 6).double(),
        "converted with ties": lambda: models.get("gpt").model().to(torch.bfloat16),
        "shared": lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2, nn.Linear(4, 4)),
    }


@pytest.mark.parametrize("name", _modules())
def test_other_ways_of_initialising(name: str) -> None:
    assert _differences(_modules()[name]) == []


def test_negative_control_another_seed_or_a_lost_op_is_seen() -> None:
    fn = models.get("vit").model
    torch.manual_seed(7)
    expected = _named(fn())
    model = deferred_init(fn)
    other = materialise(model, 8)
    assert not torch.equal(expected["head.weight"], other["head.weight"])
    recording = recording_of(model)
    lost = next(i for i, op in enumerate(recording.ops) if op.random)
    recording.ops[lost] = replace(recording.ops[lost], random=False, call=lambda tensor, *_: tensor.zero_())
    values = materialise(model, 7)
    assert sum(not torch.equal(values[n], e) for n, e in expected.items()) > len(expected) / 3


def test_the_meta_model_is_the_model_in_all_but_values() -> None:
    model, real = deferred_init(models.get("gpt").model), models.get("gpt").model()
    assert type(model) is type(real)
    assert [(n, p.shape, p.dtype, p.requires_grad, type(p)) for n, p in model.named_parameters()] == [
        (n, p.shape, p.dtype, p.requires_grad, type(p)) for n, p in real.named_parameters()
    ]
    assert model.head.weight is model.token_embedding.weight
    assert recording_of(real) is None
    copied = copy.deepcopy(model)
    assert torch.equal(materialise(copied, 0)["norm.weight"], materialise(model, 0)["norm.weight"])


def test_lstm_runs_on_its_new_parameters() -> None:
    model = deferred_init(nn.LSTM, 4, 6)
    assert all(any(w is p for p in model.parameters()) for w in model._flat_weights)


def test_tied_tensors_are_kept_once_and_stay_tied() -> None:
    asked: list[str] = []

    def keep(name: str, full: Tensor) -> Tensor:
        asked.append(name)
        return full[:1]

    values = materialise(deferred_init(models.get("gpt").model), 0, keep)
    assert values["head.weight"] is values["token_embedding.weight"]
    assert len(asked) == len(set(asked)) == len(values) - 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_s_shard_is_the_chunk_of_the_single_device_value(ranks: int) -> None:
    torch.manual_seed(3)
    expected = _named(models.get("llama").model())
    model = deferred_init(models.get("llama").model)
    for rank in range(ranks):
        shards = materialise(model, 3, lambda name, full, r=rank: full.narrow(0, *chunk(len(full), ranks, r)))
        for name, e in expected.items():
            assert torch.equal(shards[name], e.narrow(0, *chunk(len(e), ranks, rank)))
            assert shards[name].untyped_storage().nbytes() == shards[name].nbytes


class PeakBytes(TorchDispatchMode):
    """The most bytes that storages made in it held at any one time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Any] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves((args, out)):
            if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.untyped_storage()._cdata not in self.seen:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone(_: Any) -> None:
            del self.seen[key]
            self.now -= size

        self.seen[key] = weakref.ref(storage, gone)


@pytest.mark.parametrize("family", ["mlp", "gpt", "llama", "vit"])
def test_at_most_two_full_tensors_live_at_a_time(family: str) -> None:
    model = deferred_init(models.get(family).model)
    sizes = {id(p): p.nbytes for p in model.parameters()}
    states = sum(op.random for op in recording_of(model).ops) * torch.get_rng_state().nbytes

    def peak(keep: Callable[[str, Tensor], Tensor]) -> int:
        with PeakBytes() as mode:
            materialise(model, 0, keep)
        return mode.peak

    assert peak(lambda name, full: full[:0].clone()) <= 2 * max(sizes.values()) + states + 10_000
    assert peak(lambda name, full: full) >= sum(sizes.values())  # the measure sees what is held


def test_a_program_with_interleaved_changes_still_holds_few_tensors() -> None:
    """All parameters are drawn first and all are changed afterwards, so no order of the ops alone keeps memory low."""

    def fn() -> nn.Module:
        model = nn.ModuleList(nn.Linear(100, 100, bias=False) for _ in range(20))
        for p in model.parameters():
            nn.init.normal_(p)
        for p in model.parameters():
            p.data.add_(torch.rand(100, 100))
        return model

    assert _differences(fn) == []
    model = deferred_init(fn)
    with PeakBytes() as mode:
        materialise(model, 0, lambda name, full: full[:1])
    states = sum(op.random for op in recording_of(model).ops) * torch.get_rng_state().nbytes
    assert mode.peak - states < 5 * 40_000 + 20 * 400


@pytest.mark.slow
def test_the_process_grows_by_the_shards_and_not_by_the_model() -> None:
    """Measured from outside: malloc's holes between shards once let the process grow to the full model's size."""
    script = """
import resource, torch
from torch import nn
from autoshard.initialise import deferred_init, materialise
rss = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
model = deferred_init(lambda: nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(48)]))
torch.randn(1024, 1024)
before = rss()
shards = materialise(model, 0, lambda name, full: full.chunk(8)[0])
print(rss() - before, sum(p.nbytes for p in model.parameters()) / 2**20)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    grown, model = map(float, done.stdout.split())
    assert model > 190
    assert grown < model / 8 + 16


def test_each_live_random_op_is_drawn_once() -> None:
    model = deferred_init(models.get("gpt").model)
    recording = recording_of(model)
    calls: list[int] = []
    for i, op in enumerate(recording.ops):
        if op.random:
            recording.ops[i] = replace(op, call=lambda *a, call=op.call, i=i, **k: (calls.append(i), call(*a, **k))[1])
    materialise(model, 0)
    assert calls == [i for i, op in enumerate(recording.ops) if op.random]


def test_keep_may_draw_random_numbers_of_its_own() -> None:
    model = deferred_init(models.get("mlp").model)
    plain = materialise(model, 0)
    noisy = materialise(model, 0, lambda name, full: (torch.rand(5), full)[1])
    assert all(torch.equal(noisy[name], plain[name]) for name in plain)


class Bad(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        nn.init.normal_(self.weight)
        if kind == "looks" and self.weight.sum() > 0:
            self.positive = True
        if kind == "generator":
            self.weight.data.normal_(generator=torch.Generator())
        if kind == "device":
            self.other = torch.zeros(3, device="meta")
        if kind == "outside":
            OUTSIDE.add_(1)
        if kind == "lazy":
            self.lazy = nn.LazyLinear(3)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("looks", r"_local_scalar_dense.* at .*test_initialise.py:\d+.* depend on random numbers"),
        ("generator", r"normal_.* at .*test_initialise.py:\d+ draws from its own generator"),
        ("device", r"zeros.* at .*test_initialise.py:\d+ makes a tensor on meta"),
        ("outside", r"add_.* at .*test_initialise.py:\d+ writes to a tensor made outside"),
        ("lazy", r"Bad has a lazy module"),
    ],
)
def test_what_cannot_be_replayed_is_refused(kind: str, message: str) -> None:
    before = OUTSIDE.clone()
    with pytest.raises(InitialiseError, match=message):
        deferred_init(Bad, kind)
    assert torch.equal(OUTSIDE, before)
    assert not deferred_init(Bad, "").weight.is_cpu


def test_the_refusal_names_the_parameter() -> None:
    def fn() -> nn.Module:
        class Picky(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.rand(1))
                self.value = self.scale.item()

        return Picky()

    with pytest.raises(InitialiseError, match=r"test_initialise.py:\d+, on 'scale' of Picky, reads values"):
        deferred_init(fn)


def test_misuse_is_named() -> None:
    with pytest.raises(InitialiseError, match="Linear has no recording"):
        materialise(nn.Linear(2, 2), 0)
    with pytest.raises(InitialiseError, match=r"returned int, not an nn\.Module"):
        deferred_init(lambda: 3)
    model = deferred_init(nn.Linear, 2, 2)
    model.weight = nn.Parameter(torch.empty(2, 2))
    with pytest.raises(InitialiseError, match="weight was replaced after deferred_init"):
        materialise(model, 0)
    with pytest.raises(
        InitialiseError, match=r"weight was torch.float32 \[2, 2\] .* and is torch.float16 \[2, 2\] now"
    ):
        materialise(deferred_init(nn.Linear, 2, 2).half(), 0)


def test_a_failing_replay_names_op_and_line() -> None:
    model = deferred_init(nn.Linear, 2, 2)
    recording = recording_of(model)

    def broken(*args: Any) -> Tensor:
        raise RuntimeError("out of memory")

    recording.ops[-1] = replace(recording.ops[-1], call=broken)
    with pytest.raises(InitialiseError, match=r"cannot replay broken \(.*test_initialise.py:\d+\): out of memory"):
        materialise(model, 0)


class Attached(nn.Module):
    def __init__(self, mask: bool = False, kind: type[nn.Parameter] = nn.Parameter) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.a.weight.others = {"with": [self.b.weight]}  # type: ignore[attr-defined]
        self.b.weight.back = self.a.weight  # type: ignore[attr-defined]
        self.b.bias = kind(torch.zeros(8))
        if mask:
            self.a.weight.mask = torch.ones(8, 8)  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)).square().mean()  # type: ignore[no-any-return]


def test_attributes_of_parameters_stay() -> None:
    made: Any = deferred_init(Attached)
    sharded = autoshard.compile(made, ideal({"tp": 2}), (torch.randn(4, 8),))
    assert sharded.a.weight.others["with"][0] is sharded.b.weight
    assert sharded.b.weight.back is sharded.a.weight


def test_what_would_be_lost_of_parameters_is_refused() -> None:
    with pytest.raises(InitialiseError, match=r"attribute 'mask' of 'a.weight' is a tensor"):
        deferred_init(Attached, True)
    with pytest.raises(InitialiseError, match=r"a parameter of class Own is made at .*test_initialise.py:\d+"):
        deferred_init(Attached, False, type("Own", (nn.Parameter,), {"__module__": __name__}))
