"""Slicing, concatenation, padding, flips, FFT, and other ops that rearrange parts of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.program import LocalCall, axes_argument
from autoshard.passes.ir.sizes import Size, always_reaches
from autoshard.passes.rules.base import (
    KEEPS_NOTHING,
    Dims,
    Factors,
    Facts,
    Rule,
    Site,
    SpaceOf,
    Types,
    broadcast,
    dims_argument,
    indexed_dim_form,
    numbered_factors,
    positive,
    rules,
    sizes_of,
)
from autoshard.passes.rules.families.windows import SlidingDim, sharded_windows, with_halo
from autoshard.runtime.transport.window import Window


def _same_rank_factors(
    whole: Callable[[Node, tuple[int, ...]], Sequence[int]], linear: bool = True, nonempty: bool = False
) -> Callable[[Node, Graph], Factors]:
    """Ops that keep the number of dims; ``whole(node, shape)``: dims that must be unsharded."""

    def factors(node: Node, graph: Graph) -> Factors:
        shapes = graph.shapes(node.inputs)
        dims = numbered_factors(shapes[0], whole(node, shapes[0]))
        every = tuple(range(len(shapes)))
        return Factors(
            (dims,) * len(shapes),
            (dims,) * len(node.outputs),
            sizes_of(shapes[0]),
            nonempty=frozenset(sizes_of(shapes[0])) if nonempty else frozenset(),
            linear=(every,) if linear else (),
        )

    return factors


def _named_dims(node: Node, shape: tuple[int, ...]) -> Sequence[int]:
    return dims_argument(node.argument("dim", node.argument("dims", None)), len(shape))


def _last_two(node: Node, shape: tuple[int, ...]) -> Sequence[int]:
    return range(len(shape))[-2:]


# --- slices and pads: shifted windows of one position ---


def _shift_windows(node: Node, graph: Graph) -> tuple[SlidingDim, ...]:
    """Dims that a slice or pad shifts and that stay sharded, with halos; not if a slice drops half
    or more, as most positions would move to another rank."""
    (shape,), (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    shifts = _shifts(node, shape)
    found = (SlidingDim(d, shape[d], result[d], Window(padding=n)) for d, n in shifts.items())
    return tuple(s for s in found if s.fixed and 2 * s.to > s.size)


def _shifts(node: Node, shape: tuple[int, ...]) -> dict[int, int]:
    """Changed dims → positions put in front; of slices with step 1 and constant pads."""
    if "pad" not in str(node.op):
        start = node.argument("start") or 0
        fixed = {d: n for d in _changed(node, shape) if not isinstance(n := shape[d], Size)}
        known = isinstance(start, int) and node.argument("step") == 1
        return {d: -min(max(positive(start, n), 0), n) for d, n in fixed.items() if known}
    pad = node.argument("pad")
    return {d: pad[2 * (len(shape) - 1 - d)] for d in _changed(node, shape)} if _is_constant(node) else {}


def _changed(node: Node, shape: tuple[int, ...]) -> Sequence[int]:
    """Dims that a slice or pad changes."""
    if "pad" in str(node.op):
        pad = node.argument("pad")
        return sorted({len(shape) - 1 - i // 2 for i in range(len(pad)) if pad[i]})
    dim = positive(node.argument("dim"), len(shape))
    start, end, step = (node.argument(name) for name in ("start", "end", "step"))
    full = start in (None, 0) and (end is None or always_reaches(end, shape[dim])) and step == 1
    return () if full else (dim,)


def _is_constant(node: Node) -> bool:
    return bool(node.argument("mode", "constant") == "constant")


def _is_short_slice(node: Node, graph: Graph) -> bool:
    """Whether a slice is so short that all-reducing it is cheaper than a gather of the operand."""
    (shape,), (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    if "pad" in str(node.op) or node.argument("step") != 1 or not (changed := _changed(node, shape)):
        return False
    size, to = shape[changed[0]], result[changed[0]]
    return not isinstance(to, Size) and to > 0 and 2 * to < int(size)


def _shift_factors(node: Node, graph: Graph) -> Factors:
    """A slice or pad; linear if it pads with zeros or with the operand's own values."""
    (shape,), slidings = graph.shapes(node.inputs), _shift_windows(node, graph)
    gone = set(_changed(node, shape)) - {s.dim for s in slidings}
    dims = numbered_factors(shape, gone)
    linear = "pad" not in str(node.op) or not _is_constant(node) or not node.argument("value")
    sizes = sizes_of(shape) | {s.factor: s.to for s in slidings}
    nonempty = frozenset() if _is_constant(node) else frozenset(sizes)  # mirrors need elements
    taken = numbered_factors(shape) if _is_short_slice(node, graph) else dims
    return Factors((taken,), (dims,), sizes, nonempty=nonempty, linear=((0,),) if linear else ())


def _local_shift(site: Site) -> LocalCall:
    """The halo exchange does slice and pad; pads of other dims remain."""
    node, along = site.node, sharded_windows(site, _shift_windows(site.node, site.graph))
    if not along:
        return _local_short_slice(site) if _is_short_slice(node, site.graph) else site.unchanged()
    is_pad = "pad" in str(node.op)
    x: LocalCall = with_halo(site, node.argument("self"), along, (node.argument("value") or 0.0) if is_pad else 0.0)
    rank, apart = len(site.in_type(0).shape), {s.dim for s in along}
    if not is_pad or apart == set(_changed(node, site.in_type(0).shape)):
        return x
    pad = [0 if rank - 1 - i // 2 in apart else n for i, n in enumerate(node.argument("pad"))]
    return site.unchanged(self=x, pad=pad)


def _local_short_slice(site: Site) -> LocalCall:
    dim, axes = site.sharded_dim
    if not axes:
        return site.unchanged()
    x, start = site.node.argument("self"), site.node.argument("start") or 0
    lengths = site.out_type().shape[dim], site.in_type(0).shape[dim]
    return LocalCall("sharded_slice", (x, dim, start, *lengths, axes_argument(axes)), {})


def _cat(node: Node, graph: Graph) -> Factors:
    """Concatenation along an unsharded dim; 1-D empty tensors are allowed by torch."""
    (result,) = graph.shapes(node.outputs)
    dims = numbered_factors(result, (positive(node.argument("dim"), len(result)),))
    inputs = tuple(dims if len(s) == len(result) else (None,) * len(s) for s in graph.shapes(node.inputs))
    return Factors(inputs, (dims,), sizes_of(result), linear=(tuple(range(len(inputs))),))


def _rotated(node: Node, graph: Graph) -> Factors:
    """``rot90`` flips and swaps two unsharded dims."""
    (shape,), (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    turned = dims_argument(node.argument("dims"), len(shape))
    return Factors(
        (numbered_factors(shape, turned),), (numbered_factors(result, turned),), sizes_of(shape), linear=((0,),)
    )


def _stacks(dim: int) -> Callable[[Node, Graph], Factors]:
    """``hstack`` and its kin: concatenation along ``dim`` if every operand has it."""

    def factors(node: Node, graph: Graph) -> Factors:
        shapes, (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
        joined = all(len(s) == len(result) > dim for s in shapes)
        dims = numbered_factors(result, (dim,) if joined else range(len(result)))
        inputs = tuple(dims if joined else (None,) * len(s) for s in shapes)
        return Factors(inputs, (dims,), sizes_of(result), linear=(tuple(range(len(shapes))),))

    return factors


def _stack(node: Node, graph: Graph) -> Factors:
    (result,) = graph.shapes(node.outputs)
    dim = positive(node.argument("dim"), len(result))
    dims = numbered_factors(result, (dim,))
    inputs = (dims[:dim] + dims[dim + 1 :],) * len(node.inputs)
    return Factors(inputs, (dims,), sizes_of(result), linear=(tuple(range(len(inputs))),))


def _without_dim(node: Node, graph: Graph, whole: bool) -> Factors:
    """The result lacks ``dim``; if that is sharded, one rank holds the slice, so it is Partial."""
    (shape,) = graph.shapes(node.inputs)
    dim = positive(node.argument("dim"), len(shape))
    dims = numbered_factors(shape, (dim,) if whole else ())
    result = dims[:dim] + dims[dim + 1 :]
    return Factors((dims,), (result,) * len(node.outputs), sizes_of(shape), linear=((0,),))


def _select_scatter(node: Node, graph: Graph) -> Factors:
    shape = graph.shapes(node.inputs)[0]
    dim = positive(node.argument("dim"), len(shape))
    dims = numbered_factors(shape, (dim,))
    return Factors((dims, dims[:dim] + dims[dim + 1 :]), (dims,), sizes_of(shape), linear=((0, 1),))


def _im2col_factors(node: Node, graph: Graph) -> Factors:
    """im2col, col2im: samples, and channels in equal chunks, which are then chunks of rows."""
    (shape,), (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    image = shape if "im2col" in str(node.op) else result
    lead: Dims = ("n",) if max(len(shape), len(result)) == 4 else ()
    dims = [(*lead, "c", *(None,) * (len(s) - len(lead) - 1)) for s in (shape, result)]
    sizes = {"n": shape[0], "c": image[len(lead)]}
    return Factors((dims[0],), (dims[1],), sizes, even=frozenset({"c"}), nonempty=frozenset({"n"}), linear=((0,),))


def _weight_norm(node: Node, graph: Graph) -> Factors:
    """Slices along ``dim`` are independent; norms have length 1 in all other dims."""
    shapes = graph.shapes(node.inputs)
    dim = node.argument("dim")  # -1: one norm of all
    inputs = tuple(tuple("d" if d == dim else None for d in range(len(s))) for s in shapes)
    outputs = tuple(tuple("d" if d == dim else None for d in range(len(s))) for s in graph.shapes(node.outputs))
    linear = ((1,),) if node.op is aten._weight_norm.default else ()
    # the kernel crashes on an empty chunk
    return Factors(inputs, outputs, {"d": shapes[0][dim]} if dim >= 0 else {}, nonempty=frozenset("d"), linear=linear)


def _meshgrid(node: Node, graph: Graph) -> Factors:
    """One dim per operand in every result; ``indexing="xy"`` swaps the first two."""
    shapes, results = graph.shapes(node.inputs), graph.shapes(node.outputs)
    names = [f"d{d}" for d in range(len(shapes))]
    order = list(names)
    if node.argument("indexing", None) == "xy":
        order[:2] = order[:2][::-1]
    inputs = tuple((f,) * len(s) for f, s in zip(names, shapes, strict=True))
    sizes = {f: s[0] for f, s in zip(names, shapes, strict=True) if s}
    return Factors(inputs, (tuple(order),) * len(results), sizes, linear=(tuple(range(len(shapes))),))


def _broadcast_tensors(node: Node, graph: Graph) -> Factors:
    shapes = graph.shapes(node.inputs)
    common = graph.shapes(node.outputs)[0]
    names = numbered_factors(common)
    inputs = tuple(broadcast(s, common, names) for s in shapes)
    return Factors(inputs, (names,) * len(node.outputs), sizes_of(common), linear=(tuple(range(len(shapes))),))


def _diagonal(node: Node, graph: Graph) -> Factors:
    """``diagonal`` and ``diagonal_scatter``."""
    shape, *written = graph.shapes(node.inputs)
    gone = {positive(node.argument(name), len(shape)) for name in ("dim1", "dim2")}
    dims = numbered_factors(shape, gone)
    line: Dims = (*(f for d, f in enumerate(dims) if d not in gone), None)
    if written:
        return Factors((dims, line), (dims,), sizes_of(shape), linear=((0, 1),))
    return Factors((dims,), (line,), sizes_of(shape), linear=((0,),))


def _renorm(node: Node, graph: Graph) -> Factors:
    """Slices along ``dim`` are independent."""
    (shape,) = graph.shapes(node.inputs)
    dim = positive(node.argument("dim"), len(shape))
    dims: Dims = tuple("d" if d == dim else None for d in range(len(shape)))
    return Factors((dims,), (dims,), {"d": shape[dim]})


def _unpooled(positions: int) -> Callable[[Node, Graph], Factors]:
    """The last dims are unsharded; the kernel takes no empty channels."""

    def factors(node: Node, graph: Graph) -> Factors:
        shape = graph.shapes(node.inputs)[0]
        dims = numbered_factors(shape, range(len(shape) - positions, len(shape)))
        sizes = sizes_of(shape)
        return Factors((dims, dims), (dims,), sizes, nonempty=frozenset(sizes), linear=((0,),))

    return factors


def _unfold(node: Node, graph: Graph) -> Factors:
    (shape,) = graph.shapes(node.inputs)
    dims = numbered_factors(shape, (positive(node.argument("dimension"), len(shape)),) if shape else ())
    return Factors((dims,), ((*dims, None),), sizes_of(shape), linear=((0,),))


def _pixels(node: Node, graph: Graph) -> Factors:
    """Blocks of channels and positions: the last three dims are sharded in equal blocks."""
    (shape,), (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    dims = numbered_factors(shape)
    sizes = {f: min(a, b) for f, a, b in zip(dims, shape, result, strict=True) if f is not None}
    even, nonempty = frozenset(f for f in dims[-3:] if f), frozenset(sizes)  # backward fails if empty
    return Factors((dims,), (dims,), sizes, even, nonempty=nonempty, linear=((0,),))


# FFT of zero rows is an error, so no rank may hold an empty chunk.
_FFT = """
    fft_fft.default fft_ifft.default fft_irfft.default fft_hfft.default
    fft_fftn.default fft_ifftn.default fft_irfftn.default fft_fftshift.default fft_ifftshift.default
"""
_FFT2 = "fft_fft2.default fft_ifft2.default fft_irfft2.default"
_REAL_FFT = "fft_rfft.default fft_ihfft.default fft_rfftn.default"


def _norms(node: Node, types: Types) -> tuple[TensorType, ...]:
    return () if 1 in node.output_slots else (replace(types[node.inputs[1]], grad=False),)


VIEW_FACTS = Facts(saves="", view=True)
OPERAND = Facts(saves="self")
UNPOOL_FACTS = Facts(saves="indices")
PAD_FACTS = Facts(saves=lambda node, types: "" if _is_constant(node) else "self")
WEIGHT_NORM = Facts(lambda node, types: None if node.argument("dim") == -1 else "v g result1", _norms)

_SAVE_NOTHING: dict[str, tuple[SpaceOf, str]] = {
    "narrow.default narrow_copy.default diff.default tensor_split.sections tensor_split.indices": (
        _same_rank_factors(_named_dims),
        "dim unsharded",
    ),
    "flip.default roll.default": (_same_rank_factors(_named_dims), "dims unsharded"),
    "tril.default triu.default": (_same_rank_factors(_last_two), "last two dims unsharded"),
    "concat.default": (_cat, "dim unsharded"),
    "hstack.default column_stack.default": (_stacks(1), "dim 1 unsharded"),
    "vstack.default": (_stacks(0), "dim 0 unsharded"),
    "dstack.default": (_stacks(2), "dim 2 unsharded"),
    "rot90.default": (_rotated, "dims unsharded"),
    "stack.default": (_stack, "new dim unsharded"),
    "unbind.int unbind_copy.int": (partial(_without_dim, whole=True), "dim unsharded"),
    "select_scatter.default": (_select_scatter, "dim unsharded"),
    "slice_scatter.default": (_same_rank_factors(_changed), "sliced dim unsharded"),
    "fliplr.default channel_shuffle.default": (_same_rank_factors(lambda node, shape: (1,)), "dim 1 unsharded"),
    "flipud.default": (_same_rank_factors(lambda node, shape: (0,)), "dim 0 unsharded"),
    "pixel_shuffle.default": (_pixels, "... (c r r) h w -> ... c (h r) (w r)"),
    "pixel_unshuffle.default": (_pixels, "... c (h r) (w r) -> ... (c r r) h w"),
    "im2col.default col2im.default": (_im2col_factors, "n c _ _ -> n (c k) _, or back"),
    _FFT: (_same_rank_factors(_named_dims, nonempty=True), "dim unsharded"),
    _FFT2: (_same_rank_factors(_named_dims, nonempty=True), "dims unsharded"),
    "diagonal.default diagonal_copy.default diagonal_scatter.default": (_diagonal, "both dims unsharded"),
    "unfold.default unfold_copy.default": (_unfold, "dim unsharded"),
}
"""ops that run unchanged on shards and save nothing → (strategies, notation)"""

RULES: tuple[Rule, ...] = (
    *rules(
        "slice.Tensor",
        _shift_factors,
        _local_shift,
        "... d ... -> ... d ...",
        sends=True,
        facts=KEEPS_NOTHING,
    ),
    *(r for ops, (space, text) in _SAVE_NOTHING.items() for r in rules(ops, space, None, text, facts=KEEPS_NOTHING)),
    *rules("glu.default", _same_rank_factors(_named_dims, linear=False), None, "dim unsharded", facts=OPERAND),
    *rules(
        "constant_pad_nd.default pad.default",
        _shift_factors,
        _local_shift,
        "... -> ...",
        sends=True,
        facts=PAD_FACTS,
    ),
    *rules("cat.default concatenate.default", _cat, None, "dim unsharded", facts=Facts(saves="", chains=True)),
    *rules(
        "select.int",
        partial(_without_dim, whole=False),
        indexed_dim_form("sharded_select", "index"),
        "dim summed",
        facts=KEEPS_NOTHING,
    ),
    *rules("_weight_norm.default _weight_norm_interface.default", _weight_norm, None, "dim", facts=WEIGHT_NORM),
    *rules("meshgrid.default meshgrid.indexing", _meshgrid, None, "a, b -> a b, a b", facts=VIEW_FACTS),
    *rules("broadcast_tensors.default", _broadcast_tensors, None, "..., ... -> ..., ...", facts=VIEW_FACTS),
    *rules("max_unpool2d.default", _unpooled(2), None, "n c _, n c _ -> n c _", facts=UNPOOL_FACTS),
    *rules("max_unpool3d.default", _unpooled(3), None, "n c _, n c _ -> n c _", facts=UNPOOL_FACTS),
    *rules(_REAL_FFT, _same_rank_factors(_named_dims, nonempty=True), None, "dim unsharded", facts=OPERAND),
    *rules("fft_rfft2.default", _same_rank_factors(_named_dims, nonempty=True), None, "dims unsharded", facts=OPERAND),
    *rules("renorm.default", _renorm, None, "dim", facts=OPERAND),
)
