"""Reinforcement learning (GRPO): a trainer and a generator with layouts of their own, and a transfer after each step.

torchrun --nproc-per-node 4 docs/examples/rl.py               # all four ranks train, and serve as two replicas of two
torchrun --nproc-per-node 4 docs/examples/rl.py --disjoint    # ranks 0 and 1 train, ranks 2 and 3 serve
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard

VOCABULARY, PROMPT, NEW, GROUP = 32, 3, 5, 8
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)


class Policy(torch.nn.Module):
    """The policy-gradient loss of sampled tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = LlamaForCausalLM(CONFIG)

    def forward(self, tokens: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        logits = self.lm(tokens[:, :-1], use_cache=False).logits
        chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        return -(advantages[:, None] * chosen[:, PROMPT - 1 :]).mean()


def reward(tokens: torch.Tensor) -> torch.Tensor:
    """The more sevens the better."""
    return (tokens[:, PROMPT:] == 7).float().mean(-1)


def advantages(score: torch.Tensor) -> torch.Tensor:
    """Of each sample among the samples of its prompt."""
    groups = score.view(-1, GROUP)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def modules(disjoint: bool) -> tuple[Any, Any, int]:
    """Trainer and generator of this rank (None where it has none), and how many replicas serve."""
    rank, examples = dist.get_rank(), (torch.zeros(4 * GROUP, PROMPT + NEW, dtype=torch.long), torch.zeros(4 * GROUP))
    trained: Any
    if disjoint:  # every rank makes both meshes, and compiles for those that it is in
        trained = DeviceMesh("cpu", torch.tensor([0, 1]), mesh_dim_names=("dp",))
        served = DeviceMesh("cpu", torch.tensor([2, 3]), mesh_dim_names=("tp",))
    else:
        trained = autoshard.Mesh({"dp": 2, "tp": 2})
        served = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("replica", "tp"))["tp"]
    trainer = generator = None
    if not disjoint or rank < 2:
        like = {"dp": "fsdp"} if disjoint else {"dp": "fsdp", "tp": "megatron"}
        trainer = autoshard.compile(Policy().train(), trained, examples, like=like)
    if not disjoint or rank >= 2:
        model = LlamaForCausalLM(CONFIG).eval()
        generator = autoshard.compile(model, served, like="megatron", training=False, dynamic=True)
        generator.generate(torch.zeros(2, PROMPT, dtype=torch.long), max_new_tokens=2)  # the first call compiles it
    return trainer, generator, 1 if disjoint else 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--disjoint", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)
    trainer, generator, replicas = modules(options.disjoint)
    prompts = torch.randint(0, VOCABULARY, (4, PROMPT), generator=torch.Generator().manual_seed(1))
    prompts = prompts.repeat_interleave(GROUP, 0)
    rank, rows = dist.get_rank(), len(prompts) // replicas
    first = 2 if options.disjoint else 0
    optimizer = None if trainer is None else torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    scores = []
    for step in range(options.steps):
        # Trainer → generator: every rank receives exactly the part of its shards that it lacks.
        report = autoshard.transfer(trainer, generator, names=lambda name: name.removeprefix("lm."))

        # Each replica samples its part of the prompts, and all ranks get all samples.
        torch.manual_seed(1000 * step + rank // 2)  # other replicas draw other numbers
        every = [torch.empty(rows, PROMPT + NEW, dtype=torch.long) for _ in range(replicas)]
        for replica, tokens in enumerate(every):
            begins = first + 2 * replica
            if generator is not None and rank // 2 == begins // 2:
                mine = prompts[replica * rows : (replica + 1) * rows]
                tokens.copy_(
                    generator.generate(mine, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=True, eos_token_id=None)
                )
        for replica, tokens in enumerate(every):
            dist.broadcast(tokens, first + 2 * replica)
        tokens = torch.cat(every)

        score = reward(tokens)
        scores.append(float(score.mean()))
        if trainer is not None and optimizer is not None:
            trainer(tokens, advantages(score)).backward()
            autoshard.clip_grad_norm_(trainer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        print(report)
        print(f"reward: {scores[0]:.3f} → {scores[-1]:.3f}")
        right = report.schedule.received == report.schedule.bound
        print("every byte was received once" if right else "more than the missing bytes were received")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
