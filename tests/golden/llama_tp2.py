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
        power = x**2  # [2, 16, 64]  llama.py:59
        mean = power.mean([-1], True)  # [2, 16, 1]  llama.py:59
        add = mean + 1e-05  # [2, 16, 1]  llama.py:59
        rsqrt = torch.rsqrt(add)  # [2, 16, 1]  llama.py:59
        mul = x * rsqrt  # [2, 16, 64]  llama.py:59
        attention_norm = mul * self.attention_norm.weight  # [2, 16, 64]  llama.py:59
        # I@tp → R@tp    backward: all-reduce
        attention_norm = runtime.enter(attention_norm, "tp")
        # [2, 16, 32/64] S(2)@tp  llama.py:82
        q = F.linear(attention_norm, self.attention.q.weight)
        q = q.reshape(2, 16, 2, 16)  # [2, 16, 2/4, 16] S(2)@tp  llama.py:82
        q = q.transpose(1, 2)  # [2, 2/4, 16, 16] S(1)@tp  llama.py:82
        # [2, 2/4, 16, 8] S(1)@tp; [2, 2/4, 16, 8] S(1)@tp  llama.py:82
        part, part_1 = q.split(8, -1)
        mul = q * cos  # [2, 2/4, 16, 16] S(1)@tp  llama.py:82
        neg = -part_1  # [2, 2/4, 16, 8] S(1)@tp  llama.py:82
        cat = torch.cat([neg, part], dim=-1)  # [2, 2/4, 16, 16] S(1)@tp  llama.py:82
        mul_1 = cat * sin  # [2, 2/4, 16, 16] S(1)@tp  llama.py:82
        q = mul + mul_1  # [2, 2/4, 16, 16] S(1)@tp  llama.py:82
        # [2, 16, 16/32] S(2)@tp  llama.py:83
        k = F.linear(attention_norm, self.attention.k.weight)
        k = k.reshape(2, 16, 1, 16)  # [2, 16, 1/2, 16] S(2)@tp  llama.py:83
        k = k.transpose(1, 2)  # [2, 1/2, 16, 16] S(1)@tp  llama.py:83
        # [2, 1/2, 16, 8] S(1)@tp; [2, 1/2, 16, 8] S(1)@tp  llama.py:83
        part, part_1 = k.split(8, -1)
        mul = k * cos  # [2, 1/2, 16, 16] S(1)@tp  llama.py:83
        neg = -part_1  # [2, 1/2, 16, 8] S(1)@tp  llama.py:83
        cat = torch.cat([neg, part], dim=-1)  # [2, 1/2, 16, 16] S(1)@tp  llama.py:83
        mul_1 = cat * sin  # [2, 1/2, 16, 16] S(1)@tp  llama.py:83
        k = mul + mul_1  # [2, 1/2, 16, 16] S(1)@tp  llama.py:83
        # [2, 16, 16/32] S(2)@tp  llama.py:84
        v = F.linear(attention_norm, self.attention.v.weight)
        v = v.reshape(2, 16, 1, 16)  # [2, 16, 1/2, 16] S(2)@tp  llama.py:84
        v = v.transpose(1, 2)  # [2, 1/2, 16, 16] S(1)@tp  llama.py:84
        # [2, 2/4, 16, 16] S(1)@tp  llama.py:85
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2)  # [2, 16, 2/4, 16] S(2)@tp  llama.py:86
        y = y.reshape(2, 16, 32)  # [2, 16, 32/64] S(2)@tp  llama.py:86
        out = F.linear(y, self.attention.out.weight)  # [2, 16, 64] P@tp  llama.py:86
        out = runtime.all_reduce(out, "tp", to="I")  # P@tp → I@tp
        x = x + out  # [2, 16, 64]  llama.py:111
        power = x**2  # [2, 16, 64]  llama.py:59
        mean = power.mean([-1], True)  # [2, 16, 1]  llama.py:59
        add = mean + 1e-05  # [2, 16, 1]  llama.py:59
        rsqrt = torch.rsqrt(add)  # [2, 16, 1]  llama.py:59
        mul = x * rsqrt  # [2, 16, 64]  llama.py:59
        # [2, 16, 64]  llama.py:59
        feed_forward_norm = mul * self.feed_forward_norm.weight
        # I@tp → R@tp    backward: all-reduce
        feed_forward_norm = runtime.enter(feed_forward_norm, "tp")
        # [2, 16, 64/128] S(2)@tp  llama.py:97
        gate = F.linear(feed_forward_norm, self.feed_forward.gate.weight)
        silu = F.silu(gate)  # [2, 16, 64/128] S(2)@tp  llama.py:97
        # [2, 16, 64/128] S(2)@tp  llama.py:97
        up = F.linear(feed_forward_norm, self.feed_forward.up.weight)
        mul = silu * up  # [2, 16, 64/128] S(2)@tp  llama.py:97
        # [2, 16, 64] P@tp  llama.py:97
        down = F.linear(mul, self.feed_forward.down.weight)
        down = runtime.all_reduce(down, "tp", to="I")  # P@tp → I@tp
        add = x + down  # [2, 16, 64]  llama.py:112
        return add


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
        x = F.embedding(tokens, self.embedding.weight)  # [2, 16, 64]  llama.py:154
        arange = torch.arange(16, device=runtime.device())  # [16]  llama.py:155
        arange = arange.unsqueeze(1)  # [16, 1]  llama.py:126
        angles = arange * self.rope.inverse_frequencies  # [16, 8]  llama.py:126
        angles = torch.cat([angles, angles], dim=-1)  # [16, 16]  llama.py:127
        cos = torch.cos(angles)  # [16, 16]  llama.py:128
        sin = torch.sin(angles)  # [16, 16]  llama.py:128
        for block in self.blocks:
            x = block(x, cos, sin)
        power = x**2  # [2, 16, 64]  llama.py:59
        mean = power.mean([-1], True)  # [2, 16, 1]  llama.py:59
        add = mean + 1e-05  # [2, 16, 1]  llama.py:59
        rsqrt = torch.rsqrt(add)  # [2, 16, 1]  llama.py:59
        mul = x * rsqrt  # [2, 16, 64]  llama.py:59
        norm = mul * self.norm.weight  # [2, 16, 64]  llama.py:59
        norm = runtime.enter(norm, "tp")  # I@tp → R@tp    backward: all-reduce
        head = F.linear(norm, self.head.weight)  # [2, 16, 64/128] S(2)@tp  llama.py:158
        head_view = head.reshape(32, 64)  # [32, 64/128] S(1)@tp  llama.py:158
        labels = labels.reshape(32)  # [32]  llama.py:158
        # []  llama.py:158
        loss = runtime.cross_entropy(head_view, labels, classes=128, class_axes="tp")
        return (head, loss)


if __name__ == "__main__":
    runtime.main(RankModule, __file__)
