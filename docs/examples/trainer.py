"""Train a language model with Hugging Face's Trainer, stop, and resume on another mesh; under python or torchrun.

torchrun --nproc-per-node 2 docs/examples/trainer.py out --steps 4
python docs/examples/trainer.py out --steps 8 --resume     # all ranks in one process, or another number of them
"""

import argparse
import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import autoshard

BATCH, LENGTH, VOCABULARY = 4, 16, 64


def texts(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Counting upwards from a random token: something to learn."""
    start = torch.randint(0, VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(seed))
    tokens = (start + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--whole", action="store_true", help="do not shard, for comparison")
    options = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")  # "nccl" on GPUs

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    if not options.whole:
        ranks = dist.get_world_size() if dist.is_initialized() else 4
        mesh = autoshard.Mesh({"tp": ranks}, hardware="ideal_network")  # "h100", …: of what the ranks really are
        example = {"input_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long), "use_cache": False}
        model = autoshard.compile(model, mesh, (), {**example, "labels": example["input_ids"]})

    arguments = TrainingArguments(
        options.folder,
        max_steps=options.steps,
        per_device_train_batch_size=BATCH,  # the global batch: every rank is given all of it
        per_device_eval_batch_size=BATCH,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=texts(64, seed=1), eval_dataset=texts(8, seed=2))
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model()
    print(f"evaluation: {trainer.evaluate()['eval_loss']:.5f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
