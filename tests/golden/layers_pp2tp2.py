"""Deep on mesh pp=2, tp=2, in 2 stages along pp: what every rank runs, on its own shards.

Comments: local/global sizes and the layout; S(d)@axis: sharded along dim d, P@axis: a partial sum,
R@axis: replicated (its gradient is a partial sum), I@axis (not shown): replicated, and so is its gradient.
"""

import torch
import torch.nn.functional as F

from autoshard import runtime

MESH = {"tp": 2}


class Layer(runtime.Block):
    """layers.0 … layers.1, layers.3"""

    TENSORS = {
        "up.weight": "float64[4/8, 6]",
        "up.bias": "float64[4/8]",
        "down.weight": "float64[3/6, 8]",
        "down.bias": "float64[3/6]",
    }

    def forward(self, x, x_shard):
        # [2, 4/8] S(1)@tp  golden_models.py:43
        up = F.linear(x, self.up.weight, self.up.bias)
        gelu = F.gelu(up)  # [2, 4/8] S(1)@tp  golden_models.py:43
        # S(1)@tp → R@tp    backward: reduce-scatter
        gelu = runtime.all_gather(gelu, 1, "tp", to="R")
        # [2, 3/6] S(1)@tp  golden_models.py:43
        down = F.linear(gelu, self.down.weight, self.down.bias)
        add = x_shard + down  # [2, 3/6] S(1)@tp  golden_models.py:43
        return add


class Layer_2(runtime.Block):
    """layers.2"""

    TENSORS = {
        "up.weight": "float64[4/8, 6]",
        "up.bias": "float64[4/8]",
    }

    def forward(self, x):
        # [2, 4/8] S(1)@tp  golden_models.py:43
        up = F.linear(x, self.up.weight, self.up.bias)
        return up


class Layer_3(runtime.Block):
    """layers.2"""

    TENSORS = {
        "down.weight": "float64[3/6, 8]",
        "down.bias": "float64[3/6]",
    }

    def forward(self, x, x_shard):
        gelu = F.gelu(x)  # [2, 4/8] S(1)@tp  golden_models.py:43
        # S(1)@tp → R@tp    backward: reduce-scatter
        gelu = runtime.all_gather(gelu, 1, "tp", to="R")
        # [2, 3/6] S(1)@tp  golden_models.py:43
        down = F.linear(gelu, self.down.weight, self.down.bias)
        add = x_shard + down  # [2, 3/6] S(1)@tp  golden_models.py:43
        return add


class Stage0(runtime.RankModule):
    """stage 0 of Deep"""

    MESH = MESH
    BLOCKS = {f"layers.{i}": Layer for i in range(2)} | {"layers.2": Layer_2}
    TENSORS = {}

    def forward(self, x):
        x_shard = runtime.slice(x, 1, "tp", of="R")  # R@tp → S(1)@tp
        x = self.layers[0](x, x_shard)
        # S(1)@tp → R@tp    backward: reduce-scatter
        x_whole = runtime.all_gather(x, 1, "tp", to="R")
        x = self.layers[1](x_whole, x)
        # S(1)@tp → R@tp    backward: reduce-scatter
        x = runtime.all_gather(x, 1, "tp", to="R")
        x_1 = self.layers[2](x)
        x = runtime.leave(x, "tp")  # R@tp → I@tp
        return (x, x_1)


class Stage1(runtime.RankModule):
    """stage 1 of Deep"""

    MESH = MESH
    BLOCKS = {"layers.2": Layer_3, "layers.3": Layer}
    TENSORS = {}

    def forward(self, target, x, x_1):
        x = runtime.slice(x, 1, "tp", of="I")  # I@tp → S(1)@tp    backward: all-gather
        x = self.layers[2](x_1, x)
        # S(1)@tp → R@tp    backward: reduce-scatter
        x_whole = runtime.all_gather(x, 1, "tp", to="R")
        x = self.layers[3](x_whole, x)
        target = runtime.slice(target, 1, "tp", of="R")  # R@tp → S(1)@tp
        # [] P@tp  golden_models.py:56
        mse_loss = F.mse_loss(x, target, reduction="sum")
        mse_loss = runtime.all_reduce(mse_loss, "tp", to="I")  # P@tp → I@tp
        mse_loss = mse_loss / 24  # []  golden_models.py:56
        return (mse_loss,)


if __name__ == "__main__":
    runtime.main((Stage0, Stage1), __file__)
