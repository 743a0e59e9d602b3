"""Mlp on mesh fsdp=2: what every rank runs, on its own shards.

Comments: local/global sizes and the layout; S(d)@axis: sharded along dim d, P@axis: a partial sum,
R@axis: replicated (its gradient is a partial sum), I@axis (not shown): replicated, and so is its gradient.
"""

import torch
import torch.nn.functional as F

from autoshard import runtime

MESH = {"fsdp": 2}


class Block(runtime.Block):
    """blocks.0 … blocks.1"""

    TENSORS = {
        "up.weight": "float64[32/64, 16]",
        "up.bias": "float64[32/64]",
        "down.weight": "float64[8/16, 64]",
        "down.bias": "float64[8/16]",
    }

    def forward(self, x):
        # S(0)@fsdp → R@fsdp    backward: reduce-scatter
        up_weight, up_bias, down_weight, down_bias = runtime.gather_parameters(
            (self.up.weight, self.up.bias, self.down.weight, self.down.bias),
            (0, 0, 0, 0),
            "fsdp",
            to="R",
        )
        up = F.linear(x, up_weight, up_bias)  # [32/64, 64, 64] S(0)@fsdp  mlp.py:42
        gelu = F.gelu(up)  # [32/64, 64, 64] S(0)@fsdp  mlp.py:42
        # [32/64, 64, 16] S(0)@fsdp  mlp.py:42
        down = F.linear(gelu, down_weight, down_bias)
        return down


class RankModule(runtime.RankModule):
    """Mlp"""

    MESH = MESH
    GATHERS = True
    PREFETCH = 1
    BLOCKS = {f"blocks.{i}": Block for i in range(2)}
    TENSORS = {}

    def forward(self, x):
        x = runtime.slice(x, 0, "fsdp", of="R")  # R@fsdp → S(0)@fsdp
        for block in self.blocks:
            x = block(x)
        return (x,)


if __name__ == "__main__":
    runtime.main(RankModule, __file__)
