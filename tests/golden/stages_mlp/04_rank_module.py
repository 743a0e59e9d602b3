"""Mlp on mesh tp=2: what every rank runs, on its own shards.

Comments: local/global sizes and the layout; S(d)@axis: sharded along dim d, P@axis: a partial sum,
R@axis: replicated (its gradient is a partial sum), I@axis (not shown): replicated, and so is its gradient.
"""

import torch
import torch.nn.functional as F

from autoshard import runtime

MESH = {"tp": 2}


class Block(runtime.Block):
    """blocks.0 … blocks.1"""

    TENSORS = {
        "up.weight": "float32[32/64, 16]",
        "up.bias": "float32[32/64]",
        "down.weight": "float32[16, 32/64]",
        "down.bias": "float32[16]",
    }

    def forward(self, x):
        # [2, 16, 32/64] S(2)@tp  mlp.py:42
        up = F.linear(x, self.up.weight, self.up.bias)
        gelu = F.gelu(up)  # [2, 16, 32/64] S(2)@tp  mlp.py:42
        down_bias = runtime.partial(self.down.bias, "tp", of="I")  # I@tp → P@tp
        # [2, 16, 16] P@tp  mlp.py:42
        down = F.linear(gelu, self.down.weight, down_bias)
        return down


class RankModule(runtime.RankModule):
    """Mlp"""

    MESH = MESH
    BLOCKS = {f"blocks.{i}": Block for i in range(2)}
    TENSORS = {}

    def forward(self, x):
        x = self.blocks[0](x)
        x = runtime.all_reduce(x, "tp", to="R")  # P@tp → R@tp    backward: all-reduce
        x = self.blocks[1](x)
        x = runtime.all_reduce(x, "tp", to="I")  # P@tp → I@tp
        return (x,)


if __name__ == "__main__":
    runtime.main(RankModule, __file__)
