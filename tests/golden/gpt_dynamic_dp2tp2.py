"""Gpt on mesh dp=2, tp=2: what every rank runs, on its own shards.

Comments: local/global sizes and the layout; S(d)@axis: sharded along dim d, P@axis: a partial sum,
R@axis: replicated (its gradient is a partial sum), I@axis (not shown): replicated, and so is its gradient.
"""

import torch
import torch.nn.functional as F

from autoshard import runtime

MESH = {"dp": 2, "tp": 2}


class Block(runtime.Block):
    """blocks.0 … blocks.1"""

    TENSORS = {
        "norm_1.weight": "float32[32/64]",
        "norm_1.bias": "float32[32/64]",
        "attention.qkv.weight": "float32[48/192, 64]",
        "attention.qkv.bias": "float32[48/192]",
        "attention.out.weight": "float32[32/64, 64]",
        "attention.out.bias": "float32[32/64]",
        "norm_2.weight": "float32[32/64]",
        "norm_2.bias": "float32[32/64]",
        "up.weight": "float32[64/256, 64]",
        "up.bias": "float32[64/256]",
        "down.weight": "float32[64, 64/256]",
        "down.bias": "float32[64]",
    }

    def forward(self, x, batch, seq):
        # I@tp → R@tp    backward: all-reduce
        (
            norm_1_weight,
            norm_1_bias,
            out_weight,
            out_bias,
            norm_2_weight,
            norm_2_bias,
        ) = runtime.enter_parameters(
            (
                self.norm_1.weight,
                self.norm_1.bias,
                self.attention.out.weight,
                self.attention.out.bias,
                self.norm_2.weight,
                self.norm_2.bias,
            ),
            "tp",
        )
        # [batch, seq/2, 32/64] S(2)@dp S(1)@tp  gpt.py:77
        norm_1 = runtime.layer_norm(x, [64], norm_1_weight, norm_1_bias, 1e-05, "dp")
        # S(2)@dp → R@dp    backward: reduce-scatter
        norm_1 = runtime.all_gather(norm_1, 2, "dp", to="R")
        # S(1)@tp → R@tp    backward: reduce-scatter
        norm_1 = runtime.all_gather(norm_1, 1, "tp", to="R", size=seq)
        # [batch, seq, 48/192] S(2)@dp S(2)@tp  gpt.py:59
        qkv = F.linear(norm_1, self.attention.qkv.weight, self.attention.qkv.bias)
        # [batch, seq, 1/4, 48] S(2)@dp S(2)@tp  gpt.py:59
        qkv = qkv.reshape(batch, seq, 1, 48)
        qkv = qkv.transpose(1, 2)  # [batch, 1/4, seq, 48] S(1)@dp S(1)@tp  gpt.py:59
        # [batch, 1/4, seq, 16] S(1)@dp S(1)@tp; [batch, 1/4, seq, 16] S(1)@dp S(1)@tp; [batch, 1/4, seq, 16] S(1)@dp S(1)@tp  gpt.py:60
        q, k, v = qkv.split(16, -1)
        # [batch, 1/4, seq, 16] S(1)@dp S(1)@tp  gpt.py:62
        y = runtime.attention(
            q,
            k,
            v,
            attn_mask=runtime.causal_mask(q, k),
            dropout_p=0.1,
            shape=(batch, 4, seq, seq),
            cuts={1: ("dp", "tp")},
        )
        # S(1)@tp → S(2)@tp    backward: all-to-all
        y = runtime.all_to_all(y, 1, 2, "tp")
        # S(1)@dp → R@dp    backward: reduce-scatter
        y = runtime.all_gather(y, 1, "dp", to="R")
        y = y.transpose(1, 2)  # [batch, seq/2, 4, 16] S(1)@tp  gpt.py:63
        # [batch, seq/2, 64] S(1)@tp  gpt.py:63
        y = y.reshape(batch, runtime.size(seq, "tp"), 64)
        # [batch, seq/2, 32/64] S(2)@dp S(1)@tp  gpt.py:63
        out = F.linear(y, out_weight, out_bias)
        # [batch, seq/2, 32/64] S(2)@dp S(1)@tp  gpt.py:77
        dropout = runtime.dropout(out, 0.1, (batch, seq, 64), {1: "tp", 2: "dp"})
        x = x + dropout  # [batch, seq/2, 32/64] S(2)@dp S(1)@tp  gpt.py:77
        # [batch, seq/2, 32/64] S(2)@dp S(1)@tp  gpt.py:78
        norm_2 = runtime.layer_norm(x, [64], norm_2_weight, norm_2_bias, 1e-05, "dp")
        # S(2)@dp → R@dp    backward: reduce-scatter
        norm_2 = runtime.all_gather(norm_2, 2, "dp", to="R")
        # S(1)@tp → R@tp    backward: reduce-scatter
        norm_2 = runtime.all_gather(norm_2, 1, "tp", to="R", size=seq)
        # [batch, seq, 64/256] S(2)@dp S(2)@tp  gpt.py:78
        up = F.linear(norm_2, self.up.weight, self.up.bias)
        # S(2)@dp S(2)@tp → S(0)@dp S(0)@tp    backward: all-to-all
        up = runtime.all_to_all(up, 2, 0, ("dp", "tp"))
        # S(0)@tp → S(2)@tp    backward: all-to-all
        up = runtime.all_to_all(up, 0, 2, "tp", size=runtime.size(batch, "dp"))
        # [batch/2, seq, 128/256] S(0)@dp S(2)@tp  gpt.py:78
        gelu = F.gelu(up, approximate="tanh")
        # S(2)@tp → S(0)@tp    backward: all-to-all
        gelu = runtime.all_to_all(gelu, 2, 0, "tp")
        # S(0)@dp S(0)@tp → S(2)@dp S(2)@tp    backward: all-to-all
        gelu = runtime.all_to_all(gelu, 0, 2, ("dp", "tp"), size=batch)
        # I@dp I@tp → P@dp P@tp
        down_bias = runtime.partial(self.down.bias, ("dp", "tp"), of="I")
        # [batch, seq, 64] P@dp P@tp  gpt.py:78
        down = F.linear(gelu, self.down.weight, down_bias)
        # P@tp → S(1)@tp    backward: all-gather
        down = runtime.reduce_scatter(down, 1, "tp")
        # P@dp → S(2)@dp    backward: all-gather
        down = runtime.reduce_scatter(down, 2, "dp")
        # [batch, seq/2, 32/64] S(2)@dp S(1)@tp  gpt.py:78
        dropout = runtime.dropout(down, 0.1, (batch, seq, 64), {1: "tp", 2: "dp"})
        add = x + dropout  # [batch, seq/2, 32/64] S(2)@dp S(1)@tp  gpt.py:78
        return add


class RankModule(runtime.RankModule):
    """Gpt"""

    MESH = MESH
    BLOCKS = {f"blocks.{i}": Block for i in range(2)}
    TENSORS = {
        "token_embedding.weight": "float32[128, 64]",
        "position_embedding.weight": "float32[32, 64]",
        "norm.weight": "float32[32/64]",
        "norm.bias": "float32[32/64]",
    }

    def forward(self, tokens, labels):
        batch, seq = tokens.shape
        runtime.require(labels.shape == (batch, seq), batch >= 2, seq >= 2)
        # [seq/4] S(0)@dp S(0)@tp  gpt.py:108
        positions = runtime.slice(
            torch.arange(seq, device=runtime.device()), 0, ("dp", "tp"), of="R"
        )
        # I@dp I@tp → R@dp R@tp    backward: all-reduce
        token_embedding_weight, position_embedding_weight = runtime.enter_parameters(
            (self.token_embedding.weight, self.position_embedding.weight), ("dp", "tp")
        )
        tokens = runtime.slice(tokens, 1, "tp", of="R")  # R@tp → S(1)@tp
        tokens = runtime.slice(tokens, 0, "dp", of="R")  # R@dp → S(0)@dp
        # [batch/2, seq/2, 64] S(0)@dp S(1)@tp  gpt.py:109
        token_embedding = F.embedding(tokens, token_embedding_weight)
        # [seq/4, 64] S(0)@dp S(0)@tp  gpt.py:109
        position_embedding = F.embedding(positions, position_embedding_weight)
        # S(0)@dp → S(2)@dp    backward: all-to-all
        token_embedding = runtime.all_to_all(token_embedding, 0, 2, "dp", size=batch)
        # S(0)@dp S(0)@tp → S(1)@dp S(1)@tp    backward: all-to-all
        position_embedding = runtime.all_to_all(
            position_embedding, 0, 1, ("dp", "tp"), size=seq
        )
        # S(1)@tp → S(0)@tp    backward: all-to-all
        position_embedding = runtime.all_to_all(position_embedding, 1, 0, "tp")
        # [batch, seq/2, 32/64] S(2)@dp S(1)@tp  gpt.py:109
        add = token_embedding + position_embedding
        # [batch, seq/2, 32/64] S(2)@dp S(1)@tp  gpt.py:109
        x = runtime.dropout(add, 0.1, (batch, seq, 64), {1: "tp", 2: "dp"})
        for block in self.blocks:
            x = block(x, batch, seq)
        # I@tp → R@tp    backward: all-reduce
        norm_weight, norm_bias = runtime.enter_parameters(
            (self.norm.weight, self.norm.bias), "tp"
        )
        # [batch, seq/2, 32/64] S(2)@dp S(1)@tp  gpt.py:112
        norm = runtime.layer_norm(x, [64], norm_weight, norm_bias, 1e-05, "dp")
        # S(2)@dp → S(0)@dp    backward: all-to-all
        norm = runtime.all_to_all(norm, 2, 0, "dp")
        # S(1)@tp → R@tp    backward: reduce-scatter
        norm = runtime.all_gather(norm, 1, "tp", to="R", size=seq)
        # R@tp → S(0)@tp
        token_embedding_weight = runtime.slice(token_embedding_weight, 0, "tp", of="R")
        # [batch/2, seq, 64/128] S(0)@dp S(2)@tp  gpt.py:112
        head = F.linear(norm, token_embedding_weight)
        # S(2)@tp → S(0)@tp    backward: all-to-all
        head = runtime.all_to_all(head, 2, 0, "tp")
        # R@dp R@tp → S(0)@dp S(0)@tp
        labels_shard = runtime.slice(labels, 0, ("dp", "tp"), of="R")
        # [] P@dp P@tp  gpt.py:112
        loss = runtime.cross_entropy(
            head.flatten(0, -2),
            labels_shard.flatten(),
            classes=128,
            batch_axes=("dp", "tp"),
            counted=labels,
        )
        loss = runtime.all_reduce(loss, ("dp", "tp"), to="I")  # P@dp P@tp → I@dp I@tp
        return (head, loss)


if __name__ == "__main__":
    runtime.main(RankModule, __file__)
