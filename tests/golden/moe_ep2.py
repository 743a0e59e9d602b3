"""Moe on mesh ep=2: what every rank runs, on its own shards.

Comments: local/global sizes and the layout; S(d)@axis: sharded along dim d, P@axis: a partial sum,
R@axis: replicated (its gradient is a partial sum), I@axis (not shown): replicated, and so is its gradient.
"""

import torch
import torch.nn.functional as F

from autoshard import runtime

MESH = {"ep": 2}


class Block(runtime.Block):
    """blocks.0"""

    TENSORS = {
        "attention_norm.weight": "float64[32/64]",
        "attention.q.weight": "float64[64, 32/64]",
        "attention.k.weight": "float64[32, 32/64]",
        "attention.v.weight": "float64[32, 32/64]",
        "attention.out.weight": "float64[64, 32/64]",
        "feed_forward_norm.weight": "float64[32/64]",
        "feed_forward.router.weight": "float64[4, 32/64]",
        "feed_forward.experts.gate": "float64[2/4, 64, 64]",
        "feed_forward.experts.up": "float64[2/4, 64, 64]",
        "feed_forward.experts.down": "float64[2/4, 64, 64]",
    }

    def forward(self, x, cos, sin):
        power = x**2  # [1/2, 16, 64] S(0)@ep  llama.py:60
        mean = power.mean([-1], True)  # [1/2, 16, 1] S(0)@ep  llama.py:60
        add = mean + 1e-05  # [1/2, 16, 1] S(0)@ep  llama.py:60
        rsqrt = torch.rsqrt(add)  # [1/2, 16, 1] S(0)@ep  llama.py:60
        normed = x * rsqrt  # [1/2, 16, 64] S(0)@ep  llama.py:60
        # S(0)@ep → S(2)@ep    backward: all-to-all
        normed = runtime.all_to_all(normed, 0, 2, "ep")
        # [2, 16, 32/64] S(2)@ep  llama.py:61
        attention_norm = normed * self.attention_norm.weight
        # [2, 16, 64] P@ep  llama.py:84
        q = F.linear(attention_norm, self.attention.q.weight)
        q = runtime.reduce_scatter(q, 1, "ep")  # P@ep → S(1)@ep    backward: all-gather
        q = q.reshape(2, 8, 4, 16)  # [2, 8/16, 4, 16] S(1)@ep  llama.py:84
        q = q.transpose(1, 2)  # [2, 4, 8/16, 16] S(2)@ep  llama.py:84
        # [2, 4, 8/16, 8] S(2)@ep; [2, 4, 8/16, 8] S(2)@ep  llama.py:84
        part, part_1 = q.split(8, -1)
        mul = q * cos  # [2, 4, 8/16, 16] S(2)@ep  llama.py:84
        neg = -part_1  # [2, 4, 8/16, 8] S(2)@ep  llama.py:84
        cat = torch.cat([neg, part], dim=-1)  # [2, 4, 8/16, 16] S(2)@ep  llama.py:84
        mul_1 = cat * sin  # [2, 4, 8/16, 16] S(2)@ep  llama.py:84
        q = mul + mul_1  # [2, 4, 8/16, 16] S(2)@ep  llama.py:84
        # [2, 16, 32] P@ep  llama.py:85
        k = F.linear(attention_norm, self.attention.k.weight)
        k = runtime.reduce_scatter(k, 1, "ep")  # P@ep → S(1)@ep    backward: all-gather
        k = k.reshape(2, 8, 2, 16)  # [2, 8/16, 2, 16] S(1)@ep  llama.py:85
        k = k.transpose(1, 2)  # [2, 2, 8/16, 16] S(2)@ep  llama.py:85
        # [2, 2, 8/16, 8] S(2)@ep; [2, 2, 8/16, 8] S(2)@ep  llama.py:85
        part, part_1 = k.split(8, -1)
        mul = k * cos  # [2, 2, 8/16, 16] S(2)@ep  llama.py:85
        neg = -part_1  # [2, 2, 8/16, 8] S(2)@ep  llama.py:85
        cat = torch.cat([neg, part], dim=-1)  # [2, 2, 8/16, 16] S(2)@ep  llama.py:85
        mul_1 = cat * sin  # [2, 2, 8/16, 16] S(2)@ep  llama.py:85
        k = mul + mul_1  # [2, 2, 8/16, 16] S(2)@ep  llama.py:85
        # [2, 16, 32] P@ep  llama.py:86
        v = F.linear(attention_norm, self.attention.v.weight)
        v = runtime.reduce_scatter(v, 2, "ep")  # P@ep → S(2)@ep    backward: all-gather
        v = v.reshape(2, 16, 1, 16)  # [2, 16, 1/2, 16] S(2)@ep  llama.py:86
        v = v.transpose(1, 2)  # [2, 1/2, 16, 16] S(1)@ep  llama.py:86
        # S(2)@ep → S(1)@ep    backward: all-to-all
        q, k = runtime.all_to_all_together((q, k), (2, 2), (1, 1), "ep")
        # [2, 2/4, 16, 16] S(1)@ep  llama.py:87
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2)  # [2, 16, 2/4, 16] S(2)@ep  llama.py:88
        y = y.reshape(2, 16, 32)  # [2, 16, 32/64] S(2)@ep  llama.py:88
        out = F.linear(y, self.attention.out.weight)  # [2, 16, 64] P@ep  llama.py:88
        # P@ep → S(0)@ep    backward: all-gather
        out = runtime.reduce_scatter(out, 0, "ep")
        x = x + out  # [1/2, 16, 64] S(0)@ep  llama.py:113
        power = x**2  # [1/2, 16, 64] S(0)@ep  llama.py:60
        mean = power.mean([-1], True)  # [1/2, 16, 1] S(0)@ep  llama.py:60
        add = mean + 1e-05  # [1/2, 16, 1] S(0)@ep  llama.py:60
        rsqrt = torch.rsqrt(add)  # [1/2, 16, 1] S(0)@ep  llama.py:60
        normed = x * rsqrt  # [1/2, 16, 64] S(0)@ep  llama.py:60
        # S(0)@ep → S(2)@ep    backward: all-to-all
        normed = runtime.all_to_all(normed, 0, 2, "ep")
        # [2, 16, 32/64] S(2)@ep  llama.py:61
        feed_forward_norm = normed * self.feed_forward_norm.weight
        # [2, 16, 4] P@ep  moe.py:74
        router = F.linear(feed_forward_norm, self.feed_forward.router.weight)
        # P@ep → S(0)@ep    backward: all-gather
        router = runtime.reduce_scatter(router, 0, "ep")
        # [1/2, 16, 2] S(0)@ep; [1/2, 16, 2] S(0)@ep  moe.py:74
        topk, topk_1 = torch.topk(router, 2)
        softmax = F.softmax(topk, dim=-1)  # [1/2, 16, 2] S(0)@ep  moe.py:74
        # [2/4, 64, 128] S(0)@ep  moe.py:74
        einsum_2_cat = torch.cat(
            [self.feed_forward.experts.gate, self.feed_forward.experts.up], dim=2
        )
        # S(2)@ep → S(0)@ep    backward: all-to-all
        feed_forward_norm = runtime.all_to_all(feed_forward_norm, 2, 0, "ep")
        # [1/2, 16, 64] S(0)@ep  moe.py:74
        y = runtime.experts(
            feed_forward_norm,
            topk_1,
            softmax,
            einsum_2_cat,
            self.feed_forward.experts.down,
            runtime.ExpertForm(activation="silu", gated=True, transposed=True),
            sharding=runtime.ExpertSharding(
                count=4, expert_axes="ep", exchange_axes="ep"
            ),
        )
        add = x + y  # [1/2, 16, 64] S(0)@ep  llama.py:114
        return add


class Block_2(runtime.Block):
    """blocks.1"""

    TENSORS = {
        "attention_norm.weight": "float64[32/64]",
        "attention.q.weight": "float64[64, 32/64]",
        "attention.k.weight": "float64[32, 32/64]",
        "attention.v.weight": "float64[32, 32/64]",
        "attention.out.weight": "float64[64, 32/64]",
        "feed_forward_norm.weight": "float64[32/64]",
        "feed_forward.router.weight": "float64[4, 32/64]",
        "feed_forward.experts.gate": "float64[2/4, 64, 64]",
        "feed_forward.experts.up": "float64[2/4, 64, 64]",
        "feed_forward.experts.down": "float64[2/4, 64, 64]",
    }

    def forward(self, x, cos, sin):
        power = x**2  # [1/2, 16, 64] S(0)@ep  llama.py:60
        mean = power.mean([-1], True)  # [1/2, 16, 1] S(0)@ep  llama.py:60
        add = mean + 1e-05  # [1/2, 16, 1] S(0)@ep  llama.py:60
        rsqrt = torch.rsqrt(add)  # [1/2, 16, 1] S(0)@ep  llama.py:60
        normed = x * rsqrt  # [1/2, 16, 64] S(0)@ep  llama.py:60
        # S(0)@ep → S(2)@ep    backward: all-to-all
        normed = runtime.all_to_all(normed, 0, 2, "ep")
        # [2, 16, 32/64] S(2)@ep  llama.py:61
        attention_norm = normed * self.attention_norm.weight
        # [2, 16, 64] P@ep  llama.py:84
        q = F.linear(attention_norm, self.attention.q.weight)
        q = runtime.reduce_scatter(q, 1, "ep")  # P@ep → S(1)@ep    backward: all-gather
        q = q.reshape(2, 8, 4, 16)  # [2, 8/16, 4, 16] S(1)@ep  llama.py:84
        q = q.transpose(1, 2)  # [2, 4, 8/16, 16] S(2)@ep  llama.py:84
        # [2, 4, 8/16, 8] S(2)@ep; [2, 4, 8/16, 8] S(2)@ep  llama.py:84
        part, part_1 = q.split(8, -1)
        mul = q * cos  # [2, 4, 8/16, 16] S(2)@ep  llama.py:84
        neg = -part_1  # [2, 4, 8/16, 8] S(2)@ep  llama.py:84
        cat = torch.cat([neg, part], dim=-1)  # [2, 4, 8/16, 16] S(2)@ep  llama.py:84
        mul_1 = cat * sin  # [2, 4, 8/16, 16] S(2)@ep  llama.py:84
        q = mul + mul_1  # [2, 4, 8/16, 16] S(2)@ep  llama.py:84
        # [2, 16, 32] P@ep  llama.py:85
        k = F.linear(attention_norm, self.attention.k.weight)
        k = runtime.reduce_scatter(k, 1, "ep")  # P@ep → S(1)@ep    backward: all-gather
        k = k.reshape(2, 8, 2, 16)  # [2, 8/16, 2, 16] S(1)@ep  llama.py:85
        k = k.transpose(1, 2)  # [2, 2, 8/16, 16] S(2)@ep  llama.py:85
        # [2, 2, 8/16, 8] S(2)@ep; [2, 2, 8/16, 8] S(2)@ep  llama.py:85
        part, part_1 = k.split(8, -1)
        mul = k * cos  # [2, 2, 8/16, 16] S(2)@ep  llama.py:85
        neg = -part_1  # [2, 2, 8/16, 8] S(2)@ep  llama.py:85
        cat = torch.cat([neg, part], dim=-1)  # [2, 2, 8/16, 16] S(2)@ep  llama.py:85
        mul_1 = cat * sin  # [2, 2, 8/16, 16] S(2)@ep  llama.py:85
        k = mul + mul_1  # [2, 2, 8/16, 16] S(2)@ep  llama.py:85
        # [2, 16, 32] P@ep  llama.py:86
        v = F.linear(attention_norm, self.attention.v.weight)
        v = runtime.reduce_scatter(v, 2, "ep")  # P@ep → S(2)@ep    backward: all-gather
        v = v.reshape(2, 16, 1, 16)  # [2, 16, 1/2, 16] S(2)@ep  llama.py:86
        v = v.transpose(1, 2)  # [2, 1/2, 16, 16] S(1)@ep  llama.py:86
        # S(2)@ep → S(1)@ep    backward: all-to-all
        q, k = runtime.all_to_all_together((q, k), (2, 2), (1, 1), "ep")
        # [2, 2/4, 16, 16] S(1)@ep  llama.py:87
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2)  # [2, 16, 2/4, 16] S(2)@ep  llama.py:88
        y = y.reshape(2, 16, 32)  # [2, 16, 32/64] S(2)@ep  llama.py:88
        out = F.linear(y, self.attention.out.weight)  # [2, 16, 64] P@ep  llama.py:88
        # P@ep → S(0)@ep    backward: all-gather
        out = runtime.reduce_scatter(out, 0, "ep")
        x = x + out  # [1/2, 16, 64] S(0)@ep  llama.py:113
        power = x**2  # [1/2, 16, 64] S(0)@ep  llama.py:60
        mean = power.mean([-1], True)  # [1/2, 16, 1] S(0)@ep  llama.py:60
        add = mean + 1e-05  # [1/2, 16, 1] S(0)@ep  llama.py:60
        rsqrt = torch.rsqrt(add)  # [1/2, 16, 1] S(0)@ep  llama.py:60
        normed = x * rsqrt  # [1/2, 16, 64] S(0)@ep  llama.py:60
        # S(0)@ep → S(2)@ep    backward: all-to-all
        normed = runtime.all_to_all(normed, 0, 2, "ep")
        # [2, 16, 32/64] S(2)@ep  llama.py:61
        feed_forward_norm = normed * self.feed_forward_norm.weight
        # [2, 16, 4] P@ep  moe.py:74
        router = F.linear(feed_forward_norm, self.feed_forward.router.weight)
        # P@ep → S(0)@ep    backward: all-gather
        router = runtime.reduce_scatter(router, 0, "ep")
        # [1/2, 16, 2] S(0)@ep; [1/2, 16, 2] S(0)@ep  moe.py:74
        topk, topk_1 = torch.topk(router, 2)
        softmax = F.softmax(topk, dim=-1)  # [1/2, 16, 2] S(0)@ep  moe.py:74
        # [2/4, 64, 128] S(0)@ep  moe.py:74
        einsum_5_cat = torch.cat(
            [self.feed_forward.experts.gate, self.feed_forward.experts.up], dim=2
        )
        # S(2)@ep → S(0)@ep    backward: all-to-all
        feed_forward_norm = runtime.all_to_all(feed_forward_norm, 2, 0, "ep")
        # [1/2, 16, 64] S(0)@ep  moe.py:74
        y = runtime.experts(
            feed_forward_norm,
            topk_1,
            softmax,
            einsum_5_cat,
            self.feed_forward.experts.down,
            runtime.ExpertForm(activation="silu", gated=True, transposed=True),
            sharding=runtime.ExpertSharding(
                count=4, expert_axes="ep", exchange_axes="ep"
            ),
        )
        add = x + y  # [1/2, 16, 64] S(0)@ep  llama.py:114
        return add


class RankModule(runtime.RankModule):
    """Moe"""

    MESH = MESH
    BLOCKS = {"blocks.0": Block, "blocks.1": Block_2}
    TENSORS = {
        "embedding.weight": "float64[128, 64]",
        "norm.weight": "float64[32/64]",
        "head.weight": "float64[64/128, 64]",
        "rope.inverse_frequencies": "float64[8]",
    }

    def forward(self, tokens, labels):
        # I@ep → R@ep    backward: all-reduce
        (embedding_weight,) = runtime.enter_parameters((self.embedding.weight,), "ep")
        tokens = runtime.slice(tokens, 0, "ep", of="R")  # R@ep → S(0)@ep
        x = F.embedding(tokens, embedding_weight)  # [1/2, 16, 64] S(0)@ep  moe.py:102
        # [8/16] S(0)@ep  moe.py:103
        arange = runtime.slice(
            torch.arange(16, device=runtime.device()), 0, "ep", of="R"
        )
        arange = arange.unsqueeze(1)  # [8/16, 1] S(0)@ep  llama.py:130
        # [8/16, 8] S(0)@ep  llama.py:130
        angles = arange * self.rope.inverse_frequencies
        angles = torch.cat([angles, angles], dim=-1)  # [8/16, 16] S(0)@ep  llama.py:131
        cos = torch.cos(angles)  # [8/16, 16] S(0)@ep  llama.py:132
        sin = torch.sin(angles)  # [8/16, 16] S(0)@ep  llama.py:132
        x = self.blocks[0](x, cos, sin)
        x = self.blocks[1](x, cos, sin)
        power = x**2  # [1/2, 16, 64] S(0)@ep  llama.py:60
        mean = power.mean([-1], True)  # [1/2, 16, 1] S(0)@ep  llama.py:60
        add = mean + 1e-05  # [1/2, 16, 1] S(0)@ep  llama.py:60
        rsqrt = torch.rsqrt(add)  # [1/2, 16, 1] S(0)@ep  llama.py:60
        normed = x * rsqrt  # [1/2, 16, 64] S(0)@ep  llama.py:60
        # S(0)@ep → S(2)@ep    backward: all-to-all
        normed = runtime.all_to_all(normed, 0, 2, "ep")
        norm = normed * self.norm.weight  # [2, 16, 32/64] S(2)@ep  llama.py:61
        # S(2)@ep → R@ep    backward: reduce-scatter
        norm = runtime.all_gather(norm, 2, "ep", to="R")
        head = F.linear(norm, self.head.weight)  # [2, 16, 64/128] S(2)@ep  moe.py:106
        # S(2)@ep → S(0)@ep    backward: all-to-all
        head = runtime.all_to_all(head, 2, 0, "ep")
        labels_shard = runtime.slice(labels, 0, "ep", of="R")  # R@ep → S(0)@ep
        # [] P@ep  moe.py:106
        loss = runtime.cross_entropy(
            head.flatten(0, -2), labels_shard.flatten(), batch_axes="ep", counted=labels
        )
        loss = runtime.all_reduce(loss, "ep", to="I")  # P@ep → I@ep
        return (head, loss)


if __name__ == "__main__":
    runtime.main(RankModule, __file__)
