"""Llama on mesh tp=2: what every rank runs, on its own shards.

Comments: local/global sizes and the layout; S(d)@axis: sharded along dim d, P@axis: a summand,
R@axis: whole (its gradient is a summand), I@axis (not shown): whole, and so is its gradient.
"""

import torch
import torch.nn.functional as F

from autoshard import runtime

MESH = {"tp": 2}


class Block(runtime.Block):
    """blocks.0 … blocks.1"""

    TENSORS = {
        "attention_norm.weight": "float32[64]",
        "attention.q.weight": "float32[32/64, 64]",
        "attention.k.weight": "float32[16/32, 64]",
        "attention.v.weight": "float32[16/32, 64]",
        "attention.out.weight": "float32[64, 32/64]",
        "feed_forward_norm.weight": "float32[64]",
        "feed_forward.gate.weight": "float32[64/128, 64]",
        "feed_forward.up.weight": "float32[64/128, 64]",
        "feed_forward.down.weight": "float32[64, 64/128]",
    }

    def forward(self, x, cos, sin):
        pow = x**2  # [2, 16, 64]  llama.py:59
        mean = pow.mean([-1], True)  # [2, 16, 1]  llama.py:59
        add = mean + 1e-05  # [2, 16, 1]  llama.py:59
        rsqrt = torch.rsqrt(add)  # [2, 16, 1]  llama.py:59
        mul = x * rsqrt  # [2, 16, 64]  llama.py:59
        attention_norm = mul * self.attention_norm.weight  # [2, 16, 64]  llama.py:59
        # I@tp → R@tp    backward: all-reduce
        attention_norm = runtime.enter(attention_norm, "tp")
        # [2, 16, 32/64] S(2)@tp  llama.py:82
        q = F.linear(attention_norm, self.attention.q.weight)
        view = q.reshape(2, 16, 2, 16)  # [2, 16, 2/4, 16] S(2)@tp  llama.py:82
        transpose = view.transpose(1, 2)  # [2, 2/4, 16, 16] S(1)@tp  llama.py:82
        # [2, 2/4, 16, 8] S(1)@tp; [2, 2/4, 16, 8] S(1)@tp  llama.py:82
        split, split_1 = transpose.split(8, -1)
        mul_1 = transpose * cos  # [2, 2/4, 16, 16] S(1)@tp  llama.py:82
        neg = -split_1  # [2, 2/4, 16, 8] S(1)@tp  llama.py:82
        cat = torch.cat([neg, split], dim=-1)  # [2, 2/4, 16, 16] S(1)@tp  llama.py:82
        mul_2 = cat * sin  # [2, 2/4, 16, 16] S(1)@tp  llama.py:82
        add_1 = mul_1 + mul_2  # [2, 2/4, 16, 16] S(1)@tp  llama.py:82
        # [2, 16, 16/32] S(2)@tp  llama.py:83
        k = F.linear(attention_norm, self.attention.k.weight)
        view_1 = k.reshape(2, 16, 1, 16)  # [2, 16, 1/2, 16] S(2)@tp  llama.py:83
        transpose_1 = view_1.transpose(1, 2)  # [2, 1/2, 16, 16] S(1)@tp  llama.py:83
        # [2, 1/2, 16, 8] S(1)@tp; [2, 1/2, 16, 8] S(1)@tp  llama.py:83
        split_2, split_3 = transpose_1.split(8, -1)
        mul_3 = transpose_1 * cos  # [2, 1/2, 16, 16] S(1)@tp  llama.py:83
        neg_1 = -split_3  # [2, 1/2, 16, 8] S(1)@tp  llama.py:83
        # [2, 1/2, 16, 16] S(1)@tp  llama.py:83
        cat_1 = torch.cat([neg_1, split_2], dim=-1)
        mul_4 = cat_1 * sin  # [2, 1/2, 16, 16] S(1)@tp  llama.py:83
        add_2 = mul_3 + mul_4  # [2, 1/2, 16, 16] S(1)@tp  llama.py:83
        # [2, 16, 16/32] S(2)@tp  llama.py:84
        v = F.linear(attention_norm, self.attention.v.weight)
        view_2 = v.reshape(2, 16, 1, 16)  # [2, 16, 1/2, 16] S(2)@tp  llama.py:84
        transpose_2 = view_2.transpose(1, 2)  # [2, 1/2, 16, 16] S(1)@tp  llama.py:84
        # [2, 2/4, 16, 16] S(1)@tp  llama.py:85
        attention = F.scaled_dot_product_attention(
            add_1, add_2, transpose_2, is_causal=True, enable_gqa=True
        )
        transpose_3 = attention.transpose(1, 2)  # [2, 16, 2/4, 16] S(2)@tp  llama.py:86
        # [2, 16, 32/64] S(2)@tp  llama.py:86
        attention_1 = transpose_3.reshape(2, 16, 32)
        # [2, 16, 64] P@tp  llama.py:86
        out = F.linear(attention_1, self.attention.out.weight)
        out = runtime.all_reduce(out, "tp", to="I")  # P@tp → I@tp
        add_3 = x + out  # [2, 16, 64]  llama.py:111
        pow_1 = add_3**2  # [2, 16, 64]  llama.py:59
        mean_1 = pow_1.mean([-1], True)  # [2, 16, 1]  llama.py:59
        add_4 = mean_1 + 1e-05  # [2, 16, 1]  llama.py:59
        rsqrt_1 = torch.rsqrt(add_4)  # [2, 16, 1]  llama.py:59
        mul_5 = add_3 * rsqrt_1  # [2, 16, 64]  llama.py:59
        # [2, 16, 64]  llama.py:59
        feed_forward_norm = mul_5 * self.feed_forward_norm.weight
        # I@tp → R@tp    backward: all-reduce
        feed_forward_norm = runtime.enter(feed_forward_norm, "tp")
        # [2, 16, 64/128] S(2)@tp  llama.py:97
        gate = F.linear(feed_forward_norm, self.feed_forward.gate.weight)
        silu = F.silu(gate)  # [2, 16, 64/128] S(2)@tp  llama.py:97
        # [2, 16, 64/128] S(2)@tp  llama.py:97
        up = F.linear(feed_forward_norm, self.feed_forward.up.weight)
        feed_forward = silu * up  # [2, 16, 64/128] S(2)@tp  llama.py:97
        # [2, 16, 64] P@tp  llama.py:97
        down = F.linear(feed_forward, self.feed_forward.down.weight)
        down = runtime.all_reduce(down, "tp", to="I")  # P@tp → I@tp
        add_5 = add_3 + down  # [2, 16, 64]  llama.py:112
        return add_5


class RankModule(runtime.RankModule):
    """Llama"""

    MESH = MESH
    BLOCKS = {f"blocks.{i}": Block for i in range(2)}
    TENSORS = {
        "embedding.weight": "float32[128, 64]",
        "norm.weight": "float32[64]",
        "head.weight": "float32[64/128, 64]",
        "rope.inverse_frequencies": "float32[8]",
    }

    def forward(self, tokens, labels):
        # [2, 16, 64]  llama.py:154
        embedding = F.embedding(tokens, self.embedding.weight)
        arange = torch.arange(16, device=runtime.device())  # [16]  llama.py:155
        unsqueeze = arange.unsqueeze(1)  # [16, 1]  llama.py:126
        mul = unsqueeze * self.rope.inverse_frequencies  # [16, 8]  llama.py:126
        cat = torch.cat([mul, mul], dim=-1)  # [16, 16]  llama.py:127
        cos = torch.cos(cat)  # [16, 16]  llama.py:128
        rope = torch.sin(cat)  # [16, 16]  llama.py:128
        embedding = self.blocks[0](embedding, cos, rope)
        embedding = self.blocks[1](embedding, cos, rope)
        pow = embedding**2  # [2, 16, 64]  llama.py:59
        mean = pow.mean([-1], True)  # [2, 16, 1]  llama.py:59
        add = mean + 1e-05  # [2, 16, 1]  llama.py:59
        rsqrt = torch.rsqrt(add)  # [2, 16, 1]  llama.py:59
        mul_1 = embedding * rsqrt  # [2, 16, 64]  llama.py:59
        norm = mul_1 * self.norm.weight  # [2, 16, 64]  llama.py:59
        norm = runtime.enter(norm, "tp")  # I@tp → R@tp    backward: all-reduce
        head = F.linear(norm, self.head.weight)  # [2, 16, 64/128] S(2)@tp  llama.py:158
        view = head.reshape(32, 64)  # [32, 64/128] S(1)@tp  llama.py:158
        view_1 = labels.reshape(32)  # [32]  llama.py:158
        # []  llama.py:158
        loss = runtime.cross_entropy(view, view_1, classes=128, class_axes="tp")
        return (head, loss)


if __name__ == "__main__":
    runtime.main(RankModule, __file__)
