"""Smooth on mesh sp=2: what every rank runs, on its own shards.

Comments: local/global sizes and the layout; S(d)@axis: sharded along dim d, P@axis: a partial sum,
R@axis: replicated (its gradient is a partial sum), I@axis (not shown): replicated, and so is its gradient.
"""

import torch
import torch.nn.functional as F

from autoshard import runtime

MESH = {"sp": 2}


class RankModule(runtime.RankModule):
    """Smooth"""

    MESH = MESH
    BLOCKS = {}
    TENSORS = {
        "first.weight": "float64[5, 3, 3, 3]",
        "first.bias": "float64[5]",
        "second.weight": "float64[3, 5, 5, 5]",
        "second.bias": "float64[3]",
    }

    def forward(self, images):
        images = runtime.slice(images, 2, "sp", of="R")  # R@sp → S(2)@sp
        # I@sp → R@sp    backward: all-reduce
        first_weight, first_bias, second_weight, second_bias = runtime.enter_parameters(
            (self.first.weight, self.first.bias, self.second.weight, self.second.bias),
            "sp",
        )
        # [2, 5, 4/8, 6] S(2)@sp  golden_models.py:18
        first = F.conv2d(
            runtime.halo(
                images,
                dim=2,
                size=8,
                to=8,
                axes="sp",
                window=runtime.Window(kernel=3, padding=1),
            ),
            first_weight,
            first_bias,
            [1, 1],
            [0, 1],
        )
        edges = F.gelu(first)  # [2, 5, 4/8, 6] S(2)@sp  golden_models.py:18
        # [2, 3, 4/8, 6] S(2)@sp  golden_models.py:19
        second = F.conv2d(
            runtime.halo(
                edges,
                dim=2,
                size=8,
                to=8,
                axes="sp",
                window=runtime.Window(kernel=5, padding=2),
            ),
            second_weight,
            second_bias,
            [1, 1],
            [0, 2],
        )
        smooth = images + second  # [2, 3, 4/8, 6] S(2)@sp  golden_models.py:19
        square = torch.square(smooth)  # [2, 3, 4/8, 6] S(2)@sp  golden_models.py:20
        mean = square.sum([0, 1, 2, 3], False) / 288  # [] P@sp  golden_models.py:20
        mean = runtime.all_reduce(mean, "sp", to="I")  # P@sp → I@sp
        return (mean,)


if __name__ == "__main__":
    runtime.main(RankModule, __file__)
