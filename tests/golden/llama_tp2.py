"""Llama on mesh tp=2: what every rank runs, on its own shards.

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
        "attention_norm.weight": "float64[32/64]",
        "attention.q.weight": "float64[64, 32/64]",
        "attention.k.weight": "float64[32, 32/64]",
        "attention.v.weight": "float64[32, 32/64]",
        "attention.out.weight": "float64[64, 32/64]",
        "feed_forward_norm.weight": "float64[32/64]",
        "feed_forward.gate.weight": "float64[64/128, 64]",
        "feed_forward.up.weight": "float64[64/128, 64]",
        "feed_forward.down.weight": "float64[64, 64/128]",
    }

    def forward(self, x, cos, sin):
        power = x**2  # [1/2, 16, 64] S(0)@tp  llama.py:60
        mean = power.mean([-1], True)  # [1/2, 16, 1] S(0)@tp  llama.py:60
        add = mean + 1e-05  # [1/2, 16, 1] S(0)@tp  llama.py:60
        rsqrt = torch.rsqrt(add)  # [1/2, 16, 1] S(0)@tp  llama.py:60
        normed = x * rsqrt  # [1/2, 16, 64] S(0)@tp  llama.py:60
        # S(0)@tp → S(2)@tp    backward: all-to-all
        normed = runtime.all_to_all(normed, 0, 2, "tp")
        # [2, 16, 32/64] S(2)@tp  llama.py:61
        attention_norm = normed * self.attention_norm.weight
        # [2, 16, 64] P@tp  llama.py:84
        q = F.linear(attention_norm, self.attention.q.weight)
        q = runtime.reduce_scatter(q, 1, "tp")  # P@tp → S(1)@tp    backward: all-gather
        q = q.reshape(2, 8, 4, 16)  # [2, 8/16, 4, 16] S(1)@tp  llama.py:84
        q = q.transpose(1, 2)  # [2, 4, 8/16, 16] S(2)@tp  llama.py:84
        # [2, 4, 8/16, 8] S(2)@tp; [2, 4, 8/16, 8] S(2)@tp  llama.py:84
        part, part_1 = q.split(8, -1)
        mul = q * cos  # [2, 4, 8/16, 16] S(2)@tp  llama.py:84
        neg = -part_1  # [2, 4, 8/16, 8] S(2)@tp  llama.py:84
        cat = torch.cat([neg, part], dim=-1)  # [2, 4, 8/16, 16] S(2)@tp  llama.py:84
        mul_1 = cat * sin  # [2, 4, 8/16, 16] S(2)@tp  llama.py:84
        q = mul + mul_1  # [2, 4, 8/16, 16] S(2)@tp  llama.py:84
        # [2, 16, 32] P@tp  llama.py:85
        k = F.linear(attention_norm, self.attention.k.weight)
        k = runtime.reduce_scatter(k, 1, "tp")  # P@tp → S(1)@tp    backward: all-gather
        k = k.reshape(2, 8, 2, 16)  # [2, 8/16, 2, 16] S(1)@tp  llama.py:85
        k = k.transpose(1, 2)  # [2, 2, 8/16, 16] S(2)@tp  llama.py:85
        # [2, 2, 8/16, 8] S(2)@tp; [2, 2, 8/16, 8] S(2)@tp  llama.py:85
        part, part_1 = k.split(8, -1)
        mul = k * cos  # [2, 2, 8/16, 16] S(2)@tp  llama.py:85
        neg = -part_1  # [2, 2, 8/16, 8] S(2)@tp  llama.py:85
        cat = torch.cat([neg, part], dim=-1)  # [2, 2, 8/16, 16] S(2)@tp  llama.py:85
        mul_1 = cat * sin  # [2, 2, 8/16, 16] S(2)@tp  llama.py:85
        k = mul + mul_1  # [2, 2, 8/16, 16] S(2)@tp  llama.py:85
        # [2, 16, 32] P@tp  llama.py:86
        v = F.linear(attention_norm, self.attention.v.weight)
        v = runtime.reduce_scatter(v, 2, "tp")  # P@tp → S(2)@tp    backward: all-gather
        v = v.reshape(2, 16, 1, 16)  # [2, 16, 1/2, 16] S(2)@tp  llama.py:86
        v = v.transpose(1, 2)  # [2, 1/2, 16, 16] S(1)@tp  llama.py:86
        # S(2)@tp → S(1)@tp    backward: all-to-all
        q, k = runtime.all_to_all_together((q, k), (2, 2), (1, 1), "tp")
        # [2, 2/4, 16, 16] S(1)@tp  llama.py:87
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2)  # [2, 16, 2/4, 16] S(2)@tp  llama.py:88
        y = y.reshape(2, 16, 32)  # [2, 16, 32/64] S(2)@tp  llama.py:88
        out = F.linear(y, self.attention.out.weight)  # [2, 16, 64] P@tp  llama.py:88
        # P@tp → S(0)@tp    backward: all-gather
        out = runtime.reduce_scatter(out, 0, "tp")
        x = x + out  # [1/2, 16, 64] S(0)@tp  llama.py:113
        power = x**2  # [1/2, 16, 64] S(0)@tp  llama.py:60
        mean = power.mean([-1], True)  # [1/2, 16, 1] S(0)@tp  llama.py:60
        add = mean + 1e-05  # [1/2, 16, 1] S(0)@tp  llama.py:60
        rsqrt = torch.rsqrt(add)  # [1/2, 16, 1] S(0)@tp  llama.py:60
        normed = x * rsqrt  # [1/2, 16, 64] S(0)@tp  llama.py:60
        # S(0)@tp → S(2)@tp    backward: all-to-all
        normed = runtime.all_to_all(normed, 0, 2, "tp")
        # [2, 16, 32/64] S(2)@tp  llama.py:61
        feed_forward_norm = normed * self.feed_forward_norm.weight
        # S(2)@tp → R@tp    backward: reduce-scatter
        feed_forward_norm = runtime.all_gather(feed_forward_norm, 2, "tp", to="R")
        # [2, 16, 64/128] S(2)@tp  llama.py:99
        gate = F.linear(feed_forward_norm, self.feed_forward.gate.weight)
        silu = F.silu(gate)  # [2, 16, 64/128] S(2)@tp  llama.py:99
        # [2, 16, 64/128] S(2)@tp  llama.py:99
        up = F.linear(feed_forward_norm, self.feed_forward.up.weight)
        mul = silu * up  # [2, 16, 64/128] S(2)@tp  llama.py:99
        # [2, 16, 64] P@tp  llama.py:99
        down = F.linear(mul, self.feed_forward.down.weight)
        # P@tp → S(0)@tp    backward: all-gather
        down = runtime.reduce_scatter(down, 0, "tp")
        add = x + down  # [1/2, 16, 64] S(0)@tp  llama.py:114
        return add


class RankModule(runtime.RankModule):
    """Llama"""

    MESH = MESH
    BLOCKS = {f"blocks.{i}": Block for i in range(2)}
    TENSORS = {
        "embedding.weight": "float64[128, 64]",
        "norm.weight": "float64[32/64]",
        "head.weight": "float64[64/128, 64]",
        "rope.inverse_frequencies": "float64[8]",
    }

    def forward(self, tokens, labels):
        # I@tp → R@tp    backward: all-reduce
        (embedding_weight,) = runtime.enter_parameters((self.embedding.weight,), "tp")
        tokens = runtime.slice(tokens, 0, "tp", of="R")  # R@tp → S(0)@tp
        x = F.embedding(tokens, embedding_weight)  # [1/2, 16, 64] S(0)@tp  llama.py:158
        # [8/16] S(0)@tp  llama.py:159
        arange = runtime.slice(
            torch.arange(16, device=runtime.device()), 0, "tp", of="R"
        )
        arange = arange.unsqueeze(1)  # [8/16, 1] S(0)@tp  llama.py:130
        # [8/16, 8] S(0)@tp  llama.py:130
        angles = arange * self.rope.inverse_frequencies
        angles = torch.cat([angles, angles], dim=-1)  # [8/16, 16] S(0)@tp  llama.py:131
        cos = torch.cos(angles)  # [8/16, 16] S(0)@tp  llama.py:132
        sin = torch.sin(angles)  # [8/16, 16] S(0)@tp  llama.py:132
        for block in self.blocks:
            x = block(x, cos, sin)
        power = x**2  # [1/2, 16, 64] S(0)@tp  llama.py:60
        mean = power.mean([-1], True)  # [1/2, 16, 1] S(0)@tp  llama.py:60
        add = mean + 1e-05  # [1/2, 16, 1] S(0)@tp  llama.py:60
        rsqrt = torch.rsqrt(add)  # [1/2, 16, 1] S(0)@tp  llama.py:60
        normed = x * rsqrt  # [1/2, 16, 64] S(0)@tp  llama.py:60
        # S(0)@tp → S(2)@tp    backward: all-to-all
        normed = runtime.all_to_all(normed, 0, 2, "tp")
        norm = normed * self.norm.weight  # [2, 16, 32/64] S(2)@tp  llama.py:61
        # S(2)@tp → R@tp    backward: reduce-scatter
        norm = runtime.all_gather(norm, 2, "tp", to="R")
        head = F.linear(norm, self.head.weight)  # [2, 16, 64/128] S(2)@tp  llama.py:162
        # S(2)@tp → S(0)@tp    backward: all-to-all
        head = runtime.all_to_all(head, 2, 0, "tp")
        labels_shard = runtime.slice(labels, 0, "tp", of="R")  # R@tp → S(0)@tp
        # [] P@tp  llama.py:162
        loss = runtime.cross_entropy(
            head.flatten(0, -2), labels_shard.flatten(), batch_axes="tp", counted=labels
        )
        loss = runtime.all_reduce(loss, "tp", to="I")  # P@tp → I@tp
        return (head, loss)


if __name__ == "__main__":
    runtime.main(RankModule, __file__)
