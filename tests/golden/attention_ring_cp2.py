"""Sequence on mesh cp=2: what every rank runs, on its own shards.

Comments: local/global sizes and the layout; S(d)@axis: sharded along dim d, P@axis: a partial sum,
R@axis: replicated (its gradient is a partial sum), I@axis (not shown): replicated, and so is its gradient.
"""

import torch
import torch.nn.functional as F

from autoshard import runtime

MESH = {"cp": 2}


class RankModule(runtime.RankModule):
    """Sequence"""

    MESH = MESH
    BLOCKS = {}
    TENSORS = {
        "mix.weight": "float64[24, 8]",
        "out.weight": "float64[8, 8]",
    }

    def forward(self, tokens):
        tokens = runtime.slice(tokens, 1, "cp", of="R")  # R@cp → S(1)@cp
        # I@cp → R@cp    backward: all-reduce
        mix_weight, out_weight = runtime.enter_parameters(
            (self.mix.weight, self.out.weight), "cp"
        )
        mix = F.linear(tokens, mix_weight)  # [2, 4/8, 24] S(1)@cp  golden_models.py:31
        mix = mix.reshape(2, 4, 2, 12)  # [2, 4/8, 2, 12] S(1)@cp  golden_models.py:31
        heads = mix.transpose(1, 2)  # [2, 2, 4/8, 12] S(2)@cp  golden_models.py:31
        # [2, 2, 4/8, 4] S(2)@cp; [2, 2, 4/8, 4] S(2)@cp; [2, 2, 4/8, 4] S(2)@cp  golden_models.py:32
        queries, keys, values = heads.split(4, -1)
        # [2, 2, 4/8, 4] S(2)@cp  golden_models.py:33
        attended = runtime.ring_attention(
            queries,
            keys,
            values,
            runtime.AttentionSpec(queries=8, keys=8, axes="cp", after=0),
        )
        # [2, 4/8, 2, 4] S(1)@cp  golden_models.py:34
        attended = attended.transpose(1, 2)
        attended = attended.reshape(2, 4, 8)  # [2, 4/8, 8] S(1)@cp  golden_models.py:34
        out = F.linear(attended, out_weight)  # [2, 4/8, 8] S(1)@cp  golden_models.py:34
        square = torch.square(out)  # [2, 4/8, 8] S(1)@cp  golden_models.py:34
        mean = square.sum([0, 1, 2], False) / 128  # [] P@cp  golden_models.py:34
        mean = runtime.all_reduce(mean, "cp", to="I")  # P@cp → I@cp
        return (mean,)


if __name__ == "__main__":
    runtime.main(RankModule, __file__)
