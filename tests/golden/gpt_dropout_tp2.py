"""Gpt on mesh tp=2: what every rank runs, on its own shards.

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
        "norm_1.weight": "float64[32/64]",
        "norm_1.bias": "float64[32/64]",
        "attention.qkv.weight": "float64[96/192, 64]",
        "attention.qkv.bias": "float64[96/192]",
        "attention.out.weight": "float64[32/64, 64]",
        "attention.out.bias": "float64[32/64]",
        "norm_2.weight": "float64[32/64]",
        "norm_2.bias": "float64[32/64]",
        "up.weight": "float64[128/256, 64]",
        "up.bias": "float64[128/256]",
        "down.weight": "float64[64, 128/256]",
        "down.bias": "float64[64]",
    }

    def forward(self, x):
        # [2, 16, 32/64] S(2)@tp  gpt.py:77
        norm_1 = runtime.layer_norm(
            x, [64], self.norm_1.weight, self.norm_1.bias, 1e-05, "tp"
        )
        # S(2)@tp → R@tp    backward: reduce-scatter
        norm_1 = runtime.all_gather(norm_1, 2, "tp", to="R")
        # [2, 16, 96/192] S(2)@tp  gpt.py:59
        qkv = F.linear(norm_1, self.attention.qkv.weight, self.attention.qkv.bias)
        qkv = qkv.reshape(2, 16, 2, 48)  # [2, 16, 2/4, 48] S(2)@tp  gpt.py:59
        qkv = qkv.transpose(1, 2)  # [2, 2/4, 16, 48] S(1)@tp  gpt.py:59
        # [2, 2/4, 16, 16] S(1)@tp; [2, 2/4, 16, 16] S(1)@tp; [2, 2/4, 16, 16] S(1)@tp  gpt.py:60
        q, k, v = qkv.split(16, -1)
        # [2, 2/4, 16, 16] S(1)@tp  gpt.py:62
        y = runtime.attention(
            q,
            k,
            v,
            attn_mask=runtime.causal_mask(q, k),
            dropout_p=0.1,
            shape=(2, 4, 16, 16),
            cuts={1: "tp"},
        )
        # S(1)@tp → R@tp    backward: reduce-scatter
        y = runtime.all_gather(y, 1, "tp", to="R")
        y = y.transpose(1, 2)  # [2, 16, 4, 16]  gpt.py:63
        y = y.reshape(2, 16, 64)  # [2, 16, 64]  gpt.py:63
        # [2, 16, 32/64] S(2)@tp  gpt.py:63
        out = F.linear(y, self.attention.out.weight, self.attention.out.bias)
        # [2, 16, 32/64] S(2)@tp  gpt.py:77
        dropout = runtime.dropout(out, 0.1, (2, 16, 64), {2: "tp"})
        x = x + dropout  # [2, 16, 32/64] S(2)@tp  gpt.py:77
        # [2, 16, 32/64] S(2)@tp  gpt.py:78
        norm_2 = runtime.layer_norm(
            x, [64], self.norm_2.weight, self.norm_2.bias, 1e-05, "tp"
        )
        # S(2)@tp → R@tp    backward: reduce-scatter
        norm_2 = runtime.all_gather(norm_2, 2, "tp", to="R")
        # [2, 16, 128/256] S(2)@tp  gpt.py:78
        up = F.linear(norm_2, self.up.weight, self.up.bias)
        gelu = F.gelu(up, approximate="tanh")  # [2, 16, 128/256] S(2)@tp  gpt.py:78
        down_bias = runtime.partial(self.down.bias, "tp", of="I")  # I@tp → P@tp
        # [2, 16, 64] P@tp  gpt.py:78
        down = F.linear(gelu, self.down.weight, down_bias)
        # P@tp → S(2)@tp    backward: all-gather
        down = runtime.reduce_scatter(down, 2, "tp")
        # [2, 16, 32/64] S(2)@tp  gpt.py:78
        dropout = runtime.dropout(down, 0.1, (2, 16, 64), {2: "tp"})
        add = x + dropout  # [2, 16, 32/64] S(2)@tp  gpt.py:78
        return add


class RankModule(runtime.RankModule):
    """Gpt"""

    MESH = MESH
    BLOCKS = {f"blocks.{i}": Block for i in range(2)}
    TENSORS = {
        "token_embedding.weight": "float64[128, 64]",
        "position_embedding.weight": "float64[32, 64]",
        "norm.weight": "float64[32/64]",
        "norm.bias": "float64[32/64]",
    }

    def forward(self, tokens, labels):
        # [8/16] S(0)@tp  gpt.py:108
        positions = runtime.slice(
            torch.arange(16, device=runtime.device()), 0, "tp", of="R"
        )
        # I@tp → R@tp    backward: all-reduce
        token_embedding_weight, position_embedding_weight = runtime.enter_parameters(
            (self.token_embedding.weight, self.position_embedding.weight), "tp"
        )
        tokens = runtime.slice(tokens, 1, "tp", of="R")  # R@tp → S(1)@tp
        # [2, 8/16, 64] S(1)@tp  gpt.py:109
        token_embedding = F.embedding(tokens, token_embedding_weight)
        # [8/16, 64] S(0)@tp  gpt.py:109
        position_embedding = F.embedding(positions, position_embedding_weight)
        add = token_embedding + position_embedding  # [2, 8/16, 64] S(1)@tp  gpt.py:109
        # [2, 8/16, 64] S(1)@tp  gpt.py:109
        x = runtime.dropout(add, 0.1, (2, 16, 64), {1: "tp"})
        # S(1)@tp → S(2)@tp    backward: all-to-all
        x = runtime.all_to_all(x, 1, 2, "tp")
        for block in self.blocks:
            x = block(x)
        # [2, 16, 32/64] S(2)@tp  gpt.py:112
        norm = runtime.layer_norm(
            x, [64], self.norm.weight, self.norm.bias, 1e-05, "tp"
        )
        # S(2)@tp → R@tp    backward: reduce-scatter
        norm = runtime.all_gather(norm, 2, "tp", to="R")
        # R@tp → S(0)@tp
        token_embedding_weight = runtime.slice(token_embedding_weight, 0, "tp", of="R")
        # [2, 16, 64/128] S(2)@tp  gpt.py:112
        head = F.linear(norm, token_embedding_weight)
        # S(2)@tp → S(0)@tp    backward: all-to-all
        head = runtime.all_to_all(head, 2, 0, "tp")
        labels_shard = runtime.slice(labels, 0, "tp", of="R")  # R@tp → S(0)@tp
        # [] P@tp  gpt.py:112
        loss = runtime.cross_entropy(
            head.flatten(0, -2), labels_shard.flatten(), batch_axes="tp", counted=labels
        )
        loss = runtime.all_reduce(loss, "tp", to="I")  # P@tp → I@tp
        return (head, loss)


if __name__ == "__main__":
    runtime.main(RankModule, __file__)
