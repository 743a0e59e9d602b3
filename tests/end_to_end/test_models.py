"""The reference models: shapes, losses, gradients of every parameter, meta construction, capture."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoshard
from autoshard import models
from autoshard.errors import AutoshardError
from autoshard.models.by_name import load

FAMILIES = ("mlp", "gpt", "llama", "moe", "dlrm", "vit")


def _scalar(output: Tensor | models.Output) -> Tensor:
    return output.pow(2).mean() if isinstance(output, Tensor) else output.loss


def test_registry_lists_every_family_with_a_tiny_size() -> None:
    assert {name.partition(":")[0] for name in models.names()} == set(FAMILIES)
    assert {f"{family}:tiny" for family in FAMILIES} <= set(models.names())


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(AutoshardError, match=r"no reference model 'lama:8b'. Nearest: llama:8b"):
        models.get("lama:8b")


@pytest.mark.parametrize("name", models.names())
def test_every_size_is_built_on_meta_without_memory(name: str) -> None:
    with torch.device("meta"):
        model = models.get(name).model()
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt:small", 124.4), ("gpt:xl", 1557.6), ("llama:1b", 1235.8), ("llama:8b", 8030.3), ("llama:70b", 70553.7),
     ("moe:8x7b", 46702.8), ("vit:base", 86.6), ("vit:huge", 632.0), ("llama:small", 20.45)],
)  # fmt: skip
def test_real_sizes_have_the_known_number_of_parameters(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = models.get(name).model()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_gets_a_gradient_in_float64(family: str, float64: None) -> None:
    reference = models.get(family)
    model = reference.model()
    args, kwargs = reference.inputs(batch=2, seq=8)
    loss = _scalar(model(*args, **kwargs))
    assert loss.ndim == 0
    assert math.isfinite(loss.item())
    loss.backward()
    for name, p in model.named_parameters():
        assert p.dtype == torch.float64
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name
        assert p.grad.abs().max() > 0, name


@pytest.mark.parametrize(
    ("family", "shape"),
    [("mlp", (3, 8, 16)), ("gpt", (3, 8, 128)), ("llama", (3, 8, 128)), ("moe", (3, 8, 128)), ("dlrm", (3,)),
     ("vit", (3, 12))],
)  # fmt: skip
def test_output_shapes_without_labels(family: str, shape: tuple[int, ...]) -> None:
    reference = models.get(family)
    args, _ = reference.inputs(batch=3, seq=8)
    output = reference.model()(*args)
    if isinstance(output, models.Output):
        assert output.loss is None
        output = output.logits
    assert output.shape == shape


@pytest.mark.parametrize("family", ["gpt", "llama", "moe"])
def test_language_models_start_at_a_uniform_guess_and_never_look_ahead(family: str) -> None:
    reference = models.get(family)
    model = reference.model().eval()
    (tokens,), kwargs = reference.inputs(batch=2, seq=8)
    logits, loss = model(tokens, **kwargs)
    assert loss.item() == pytest.approx(math.log(128), rel=0.05)
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % 128
    other = model(changed).logits
    assert torch.equal(other[:, :5], logits[:, :5])
    assert not torch.allclose(other[:, 5:], logits[:, 5:])


def test_labels_of_minus_100_are_not_counted() -> None:
    reference = models.get("llama")
    model = reference.model()
    (tokens,), kwargs = reference.inputs(batch=2, seq=8)
    labels = kwargs["labels"].clone()
    labels[1] = -100
    assert torch.allclose(model(tokens, labels).loss, model(tokens[:1], labels[:1]).loss)


def test_tied_embeddings_are_one_parameter() -> None:
    assert (gpt := models.get("gpt").model()).head.weight is gpt.token_embedding.weight
    tied = models.Llama(replace(models.LlamaConfig.tiny(), tied=True))
    assert tied.head.weight is tied.embedding.weight


def test_moe_gates_are_a_softmax_over_the_top_k() -> None:
    layer = models.get("moe").model().blocks[0].feed_forward
    x = torch.randn(10, 64)
    gates, logits = layer.gates(x), layer.router(x)
    assert torch.equal((gates > 0).sum(-1), torch.full((10,), 2))
    assert torch.allclose(gates.sum(-1), torch.ones(10))
    chosen = gates > 0
    assert logits[chosen].view(10, 2).amin(-1).ge(logits.masked_fill(chosen, -math.inf).amax(-1)).all()


def test_moe_equals_running_only_the_chosen_experts() -> None:
    layer = models.get("moe").model().blocks[0].feed_forward.double()
    x = torch.randn(6, 64, dtype=torch.float64)
    gates, experts = layer.gates(x), layer.experts
    expected = torch.zeros_like(x)
    for t in range(len(x)):
        for e in gates[t].nonzero().flatten().tolist():
            hidden = nn.functional.silu(x[t] @ experts.gate[e]) * (x[t] @ experts.up[e])
            expected[t] += gates[t, e] * (hidden @ experts.down[e])
    assert torch.allclose(layer(x), expected, rtol=1e-12)


def test_rotary_scores_depend_on_the_distance_only() -> None:
    from autoshard.models.llama import Rope, rotate

    rope = Rope(16, 10_000.0)
    q, k = torch.randn(1, 1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 1, 16, dtype=torch.float64)

    def score(at_q: int, at_k: int) -> float:
        (a, b), (c, d) = rope(torch.tensor([at_q])), rope(torch.tensor([at_k]))
        return (rotate(q, a, b) * rotate(k, c, d)).sum().item()

    assert score(7, 3) == pytest.approx(score(11, 7), rel=1e-5)
    assert score(7, 3) != pytest.approx(score(7, 4), rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_export_captures_what_eager_computes(family: str) -> None:
    reference = models.get(family)
    model = reference.model().eval()
    args, kwargs = reference.inputs(batch=2, seq=8)
    program = torch.export.export(model, args, kwargs, strict=False)
    expected, actual = model(*args, **kwargs), program.module()(*args, **kwargs)
    if isinstance(expected, Tensor):
        expected, actual = (expected,), (actual,)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_finite_gradients_in_16_bits(family: str, dtype: torch.dtype) -> None:
    """Made in the dtype, as by the command line, and converted, as by a user."""
    for wanted in (dtype, torch.float32):
        make, args, kwargs = load(family, 2, 8, wanted)
        model = make().to(dtype)
        if wanted == torch.float32:
            args = tuple(x.to(dtype) if x.is_floating_point() else x for x in args)
        assert {p.dtype for p in model.parameters()} == {dtype}
        _scalar(model(*args, **kwargs)).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None, name
            assert p.grad.isfinite().all(), name


def test_rotary_tables_of_a_16_bit_model_keep_their_digits() -> None:
    for family in ("llama", "moe"):
        exact, rounded = (load(family, 2, 8, dtype)[0]().rope for dtype in (torch.float32, torch.bfloat16))
        assert torch.equal(exact.inverse_frequencies, rounded.inverse_frequencies)
    assert not torch.equal(exact.inverse_frequencies, exact.inverse_frequencies.bfloat16().float())


@pytest.mark.slow_cases(
    "llama-torch.float16", "moe-torch.float16", "moe-torch.bfloat16", "*mlp*", "*gpt*", "*dlrm*", "*vit*"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_in_mixed_precision(family: str, dtype: torch.dtype) -> None:
    """Sharded gradients in 16 bits are near those of float32, those of replicas agree."""
    make, args, kwargs = load(family, 4, 16)
    model = make().eval()
    policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=torch.float32)
    mesh = autoshard.Mesh({"dp": 2, "tp": 2}, "ideal_network")
    sharded = autoshard.compile(model, mesh, args, kwargs, mixed_precision=policy, training=True)
    for module in (model, sharded):
        _scalar(module(*args, **kwargs)).backward()
    found = sharded.full_gradients()
    error = sum(float((found[n] - p.grad).pow(2).sum()) for n, p in model.named_parameters() if p.grad is not None)
    scale = sum(float(p.grad.pow(2).sum()) for p in model.parameters() if p.grad is not None)
    # a router may choose another expert after rounding
    assert 0 < math.sqrt(error / scale) < (0.2 if family == "moe" else 0.03)
