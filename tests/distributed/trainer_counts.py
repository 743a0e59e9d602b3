"""What Hugging Face's Trainer counts, as JSON: sharded by ``python`` or ``torchrun``, or whole (argument ``whole``)."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import autoshard


def counted(folder: str, average: bool, tokens: str | bool) -> dict[str, Any]:
    """After two steps of two batches each, with labels and padding of other lengths."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model: Any = LlamaForCausalLM(config)
    ids = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x.clone()} for x in ids]
    for number, row in enumerate(rows):
        row["labels"][: number % 7] = -100
        row["attention_mask"][8 - number % 3 :] = 0
    if "whole" not in sys.argv:
        example = {name: torch.stack([row[name] for row in rows[:4]]) for name in rows[0]}
        model = autoshard.compile(model, autoshard.Mesh({"tp": 2}, "ideal_network"), (), example)
    arguments = TrainingArguments(
        folder,
        max_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        average_tokens_across_devices=average,
        include_num_input_tokens_seen=tokens,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train()
    seen = trainer.state.num_input_tokens_seen, trainer.state.total_flos
    told = [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]
    return {"tokens": seen[0], "flos": seen[1], "told": told, "evaluation": trainer.evaluate()["eval_loss"]}


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    found = [counted(sys.argv[1], True, True), counted(sys.argv[1], False, "non_padding")]
    if not dist.is_initialized() or not dist.get_rank():
        print("counts:", json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()
