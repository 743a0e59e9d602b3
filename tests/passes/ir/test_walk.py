"""One walk over nested arguments, and one map: order, nesting, and what is built from them."""

from __future__ import annotations

import torch

from autoshard.passes.ir.graph import Ref, map_refs, map_tree, refs, walk
from autoshard.passes.ir.program import Local, LocalCall, Offset
from autoshard.passes.ir.sizes import free_symbols, length_symbol, make_size

aten = torch.ops.aten
INNER = LocalCall(aten.slice.Tensor, (Ref("y"), 0, Offset(8, ("tp",))), {})
TREE = LocalCall("gather", ([Ref("x"), (INNER, "dp")], {"a": Ref("z")}), {"size": Local(8, ("tp",)), "to": None})


def test_everything_is_seen_in_order() -> None:
    """A call stands before its arguments, keyword arguments after the others."""
    assert list(walk(TREE)) == [
        *(TREE, Ref("x"), INNER, Ref("y"), 0, Offset(8, ("tp",)), "dp", Ref("z")),
        *(Local(8, ("tp",)), None),
    ]
    assert [r.name for r in refs(TREE)] == ["x", "y", "z"]


def test_a_map_keeps_the_form() -> None:
    assert map_tree(TREE, lambda item: item) == TREE
    renamed = map_refs(TREE, lambda ref: Ref(ref.name.upper()))
    assert [r.name for r in refs(renamed)] == ["X", "Y", "Z"]
    assert map_refs(renamed, lambda ref: Ref(ref.name.lower())) == TREE


def test_a_map_reaches_a_call_after_its_arguments() -> None:
    """So that a map can evaluate."""
    call = LocalCall(aten.add.Tensor, (1, LocalCall(aten.mul.Tensor, (2, 3), {})), {})
    assert map_tree(call, lambda item: sum(item.args) if isinstance(item, LocalCall) else item) == 6


def test_symbols_stand_in_lengths_anywhere() -> None:
    batch = length_symbol("batch")
    n = make_size(2 * batch, {batch: 4})
    nested = LocalCall("slice", (Ref("x"), [Local(n, ("tp",))]), {"inner": LocalCall("pad", (n,), {})})
    assert free_symbols(nested) == {"batch"}
    assert free_symbols(Offset(n, ("tp",))) == {"batch"}
    assert free_symbols(TREE) == set()
