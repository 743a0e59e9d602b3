"""capture of what is no plain module: graph modules, custom ops, meta models, models of transformers, TorchScript."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_models import Inner, Model, X, check, ops
from torch import nn

from autoshard import Mesh
from autoshard.compiler import compile_graph
from autoshard.passes.capture.export import capture
from autoshard.runtime.operations.losses import cross_entropy_op

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("float64")


def test_fx_graph_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    graph = check(torch.fx.symbolic_trace(model), X)
    assert [i.fqn for i in graph.inputs if i.kind == "parameter"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_custom_op_stays_whole() -> None:
    @torch.library.custom_op("autoshard_test_capture::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, grad: grad * 2)
    graph = check(Model(lambda s, x: twice(x * s.w)), X)
    assert ops(graph) == [aten.mul.Tensor, torch.ops.autoshard_test_capture.twice.default]


@pytest.mark.slow_cases("parameters")
@pytest.mark.parametrize("where", ["all", "parameters"])
def test_meta_model_gives_the_graph_of_the_real_one(where: str) -> None:
    model: nn.Module = nn.Sequential(Inner(), nn.BatchNorm1d(4))
    expected = capture(model, (X,))
    meta = copy.deepcopy(model).to("meta")
    if where == "parameters":  # buffers are real, as Hugging Face's init_empty_weights leaves them
        meta[1].running_mean, meta[1].running_var = torch.zeros(4), torch.ones(4)
    graph = capture(meta, (X.to("meta") if where == "all" else X,))
    assert str(graph) == str(expected)
    assert all(p.is_meta for p in meta.parameters())
    lstm = nn.LSTM(4, 3, device="meta")
    flat = [id(p) for p in lstm._flat_weights]
    assert capture(lstm, (X,)).nodes
    assert [id(p) for p in lstm._flat_weights] == flat


def transformer(name: str) -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(3, 131, (3, 16))
    small: dict[str, Any] = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 64}
    kwargs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if name == "llama":  # returns a DynamicCache
        config = transformers.LlamaConfig(**small, **heads, num_key_value_heads=2)
        return transformers.LlamaForCausalLM(config), kwargs
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=131, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        return transformers.GPT2LMHeadModel(config), kwargs
    if name == "bert":
        mask = torch.ones_like(ids)
        mask[0, 10:] = 0
        config = transformers.BertConfig(**small, **heads)
        return transformers.BertForMaskedLM(config), {**kwargs, "attention_mask": mask}
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=131, **sizes)), kwargs


@pytest.mark.slow_cases("gpt2", "t5", "bert")
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_transformers(name: str) -> None:
    model, kwargs = transformer(name)
    graph = check(model.train(), **kwargs)
    tables = {"embed_tokens.weight", "wte.weight", "word_embeddings.weight", "shared.weight"}
    table = next(i for i in graph.inputs if ".".join(i.fqn.split(".")[-2:]) in tables)
    assert bool(table.aliases) == (name != "llama")
    paths = {node.fqn for node in graph.nodes}
    assert {"llama": "model.layers.1.self_attn.q_proj", "gpt2": "transformer.h.1.mlp.c_fc"}.get(name, "") in paths
    if name in ("llama", "gpt2"):
        assert {n.op for n in graph.nodes} >= {
            aten.scaled_dot_product_attention.default,
            cross_entropy_op,
        }
    assert all(n.source for n in graph.nodes)


@pytest.mark.slow
def test_cache_as_an_argument() -> None:
    model, kwargs = transformer("llama")
    model.eval()
    cache = model(input_ids=kwargs["input_ids"]).past_key_values
    lengths = cache.get_seq_length()
    graph = capture(model, (), {"input_ids": kwargs["input_ids"][:, :1], "past_key_values": cache})
    assert sum(name is not None for name in graph.flat_inputs) == 5  # ids, and keys and values of two layers
    assert cache.get_seq_length() == lengths


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hugging_face_checkpoints_are_marked(name: str) -> None:
    """Each layer has a number; the graph is otherwise the one without."""
    graphs = []
    for reentrant in (None, False, True):
        model, kwargs = transformer(name)
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})  # type: ignore[operator]
        graphs.append(capture(model.train(), (), {**kwargs, "use_cache": False}))
    for graph in graphs[1:]:
        inside = {n.checkpoint for n in graph.nodes}
        assert inside == {0, 1, 2}
        assert all(
            n.checkpoint == 0 or ".".join(n.fqn.split(".")[:3]).endswith(f".{n.checkpoint - 1}") for n in graph.nodes
        )
        assert str(graph) == str(graphs[0])
    plain, *marked = (compile_graph(graph, Mesh({"dp": 2}, "ideal_network")) for graph in graphs)
    assert not plain.plan.recomputed
    for found in marked:
        names = {r.name for r in found.plan.recomputed if r.what == "computed"}
        assert names
        assert names <= {n.name for n in graphs[1].nodes if n.checkpoint}
        assert "runtime.recompute(" in found.source.text


def test_a_linear_layer_with_a_weight_of_one_row() -> None:
    graph = check(Model(lambda s, x: F.linear(x, s.lin.weight[0])), X)
    assert aten.matmul.default in ops(graph)


@functools.lru_cache
def positions(length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float64)


def test_caches_of_the_model_hold_no_tensors_without_data() -> None:
    """Of one that is there, of one that the forward makes; what others hold stays."""
    made: list[Callable[[int], torch.Tensor]] = []
    other = functools.lru_cache(lambda n: torch.zeros(n))
    zeros = other(3)

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        if not made:
            made.append(functools.lru_cache(lambda n: positions(n) + 1))
        return model.lin(x) + positions(x.shape[-1]) + made[0](x.shape[-1])

    model = Model(forward)
    capture(model, (X,))
    capture(model, (X,))
    assert type(positions(4)) is type(made[0](4)) is torch.Tensor
    assert other(3) is zeros
    assert model(X).shape == X.shape


def test_caches_are_looked_for_where_there_are_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for them is to go through all objects of the program."""
    model, looked = Model(lambda s, x: s.lin(x)), []
    capture(model, (X,))
    referrers = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *objects: looked.append(objects) or referrers(*objects))
    capture(model, (X,))
    assert not looked
    made = functools.lru_cache(lambda: None)
    capture(model, (X,))
    assert looked == [(type(made),)]


@torch.jit.script
def scripted_clamp(x: torch.Tensor, limit: float = 5.0) -> torch.Tensor:
    return (x / limit).tanh() * limit


traced_clamp = torch.jit.trace(lambda x: (x / 5).tanh() * 5, (torch.ones(3),))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("clamp", [scripted_clamp, traced_clamp], ids=["scripted", "traced"])
def test_functions_of_torchscript_are_not_traced_as_optimised(clamp: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Clamped(Inner):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return clamp(self.lin(clamp(self.lin(clamp(self.lin(x))))))

    model = Clamped()
    for _ in range(3):  # TorchScript looks on in the first call, and optimises in the next
        model(X).sum().backward()
    assert aten.detach.default not in ops(check(model, X))
