"""One rank of a gloo world with Hugging Face's Trainer, whose batches do not divide its datasets; see test_trainer_gloo.py."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import world
from torch import nn
from torch.utils.data import IterableDataset
from transformers import TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.training_args import OptimizerNames

import autoshard

WORDS, BATCH = 12, 4
OPTIMIZERS = [name.value for name in OptimizerNames]
"""some need torch alone, others a package, a device, or arguments of their own"""


class Model(nn.Module):
    """Its loss is divided by what the Trainer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.config = SimpleNamespace(problem_type=None)  # asked for with label smoothing

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | None = None,
        **_: Any,
    ) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.embedding(input_ids)))
        if labels is None:
            return {"logits": logits}
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / count, "logits": logits}


class Layer(GradientCheckpointingLayer):
    """A layer that transformers can have recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Layered(transformers.PreTrainedModel):  # type: ignore[misc]
    """As the model, of transformers' class, with layers."""

    config_class = transformers.PreTrainedConfig
    supports_gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__(transformers.PreTrainedConfig())
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> dict[str, torch.Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def translator() -> nn.Module:
    """A small encoder and decoder without dropout."""
    sizes = {"d_model": 8, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 16, "dropout": 0.0}
    layers = {
        f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 2))
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=WORDS, forced_eos_token_id=None, **sizes, **layers, **tokens)
    )


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """A dataset without a length."""

    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(self.rows)


class Noisy(Stream):
    """Adds to its rows what a worker draws."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for row in self.rows:
            yield {**row, "input_ids": (row["input_ids"] + torch.randint(WORDS, (1,))) % WORDS}


def dataset(number: int, seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(0, WORDS, (number, 2, 6), generator=generator)
    found = [{"input_ids": ids, "labels": labels} for ids, labels in made]
    for index, row in enumerate(found):
        row["labels"][: index % 3] = -100
    return found


def padded(features: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows whose lengths differ, in one length: the sharded model is compiled for it."""
    return {
        name: torch.stack([nn.functional.pad(f[name], (0, 6 - len(f[name])), value=value) for f in features])
        for name, value in (("input_ids", 0), ("labels", -100))
    }


class Metrics:
    """Of all rows at once, or batch by batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def __call__(self, found: Any, compute_result: bool = True) -> dict[str, float]:
        parts = found.predictions, found.label_ids, found.inputs, found.losses
        self.seen.append(parts)
        if not compute_result:
            return {}
        seen, self.seen = self.seen, []
        told = {}
        for name, values in zip(("predictions", "labels", "inputs", "losses"), zip(*seen, strict=True), strict=True):
            for number, value in enumerate(flat(values)):
                told[f"{name} {number}"] = float(abs(value).sum())
                told[f"rows of {name} {number}"] = len(value)
        return told


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in flat(v)] if isinstance(value, list | tuple) else [] if value is None else [value]


def evaluated(trainer: Any, other: Any) -> dict[str, Any]:
    """What two evaluations and a prediction come to, of 6 rows and then of 3."""
    first, second = trainer.evaluate(), trainer.evaluate()
    found = trainer.predict(other)
    measured = ("runtime", "second", "time")
    return {
        "metrics": [
            {name: value for name, value in told.items() if not name.endswith(measured)}
            for told in (first, second, found.metrics)
        ],
        "predictions": [p.tolist() for p in flat(found.predictions)],
        "labels": [p.tolist() for p in flat(found.label_ids)],
    }


CASES: dict[str, dict[str, Any]] = {
    "loss": {},
    "metrics": {"metrics": True},
    "apart": {"metrics": True, "eval_do_concat_batches": False, "include_for_metrics": ["inputs", "loss"]},
    "batches": {"metrics": True, "batch_eval_metrics": True, "include_for_metrics": ["inputs", "loss"]},
    "accumulated": {"metrics": True, "eval_accumulation_steps": 1, "eval_use_gather_object": True},
    "stream": {"metrics": True, "kind": Stream},
    "stream_batches": {"metrics": True, "kind": Stream, "batch_eval_metrics": True, "include_for_metrics": ["loss"]},
    "dropped": {"metrics": True, "dataloader_drop_last": True},
    "trained": {"metrics": True, "steps": 5},
    "trained_stream": {"metrics": True, "steps": 5, "kind": Stream},
    "best": {
        "metrics": True,
        "steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "predictions 0",
    },
    "grouped": {"metrics": True, "steps": 5, "train_sampling_strategy": "group_by_length"},
    "rebalanced": {"metrics": True, "steps": 5, "train_sampling_strategy": "batch_rebalance", "lengths": True},
    "smoothed": {"steps": 3, "label_smoothing_factor": 0.1},
    "noisy": {"steps": 3, "neftune_noise_alpha": 5.0},
    "first": {"steps": 3, "compiled": False},
    "workers": {"steps": 3, "kind": Noisy, "dataloader_num_workers": 1},
    "recomputed": {"steps": 3, "model": Layered, "activation_checkpointing": True},
    "limited": {"steps": 5, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2},
    "seen": {"steps": 3, "include_num_input_tokens_seen": True},
    "generated": {
        "steps": 3,
        "model": translator,
        "compiled": False,
        "predict_with_generate": True,
        "generation_max_length": 6,
    },
    "exact": {"steps": 3},
    "rounded": {"steps": 3, "dtype": torch.float32, "bf16": True},
    **{name: {"steps": 2, "optim": name} for name in OPTIMIZERS},
}


def outcome(name: str, folder: str, whole: bool) -> dict[str, Any]:
    """A case of transformers' own Trainer, or what it says to an optimizer that cannot be made here."""
    try:
        return trained(name, folder, whole)
    except (ImportError, ValueError) as error:
        if name not in OPTIMIZERS:
            raise
        return {"refused": f"{type(error).__name__}: {error}"}


def trained(name: str, folder: str, whole: bool) -> dict[str, Any]:
    """A case with the whole model or the sharded one."""
    options = dict(CASES[name])
    metrics, steps, kind = options.pop("metrics", False), options.pop("steps", 0), options.pop("kind", list)
    lengths, compiled = options.pop("lengths", False), options.pop("compiled", True)
    torch.manual_seed(0)
    model: Any = options.pop("model", Model)().to(options.pop("dtype", torch.float64))
    if not whole:
        example = {**padded(dataset(BATCH, 0)), "num_items_in_batch": torch.tensor(9.0)}
        mesh = autoshard.Mesh({"tp": 2}, "ideal_network")
        model = autoshard.compile(model, mesh, (), example if compiled else None)
    sequences = "predict_with_generate" in options
    arguments = (transformers.Seq2SeqTrainingArguments if sequences else TrainingArguments)(
        f"{folder}/{name}",
        max_steps=steps or 1,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=0.1,
        gradient_accumulation_steps=2,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **({"save_strategy": "no"} | options),
    )
    train = dataset(14, 1)
    if lengths:
        for number, row in enumerate(train):
            row.update({k: v[: 6 - number % 4] for k, v in row.items()})
    trainer = (transformers.Seq2SeqTrainer if sequences else transformers.Trainer)(
        model,
        arguments,
        train_dataset=kind(train),
        eval_dataset=kind(dataset(6, 2)),
        data_collator=padded,
        compute_metrics=Metrics() if metrics else None,
    )
    told = []
    if steps:
        trainer.train()
        told = [e[k] for e in trainer.state.log_history for k in ("loss", "grad_norm", "eval_loss") if k in e]
    weights = model.state_dict() if whole else model.full_state_dict()
    return {
        "told": told,
        "weights": [w.tolist() for w in weights.values()],
        "seen": trainer.state.num_input_tokens_seen,
        "kept": sorted(int(path.name.split("-")[1]) for path in Path(arguments.output_dir).glob("checkpoint-*")),
        **evaluated(trainer, kind(dataset(3, 3))),
    }


def main(rank: int, ranks: int, rendezvous: str, result: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    world.join(rendezvous, rank, ranks)
    found = {name: outcome(name, str(Path(result).parent), whole=False) for name in sys.argv[4].split(",")}
    if rank == 0:
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    world.main(main)
