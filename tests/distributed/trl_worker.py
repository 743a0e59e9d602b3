"""One rank of a gloo world with the trainers of TRL and the adapters of PEFT; see test_trl_gloo.py."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import world
from datasets import Dataset
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.kernels import chunked_logprob

import autoshard
from autoshard.errors import CaptureError

WORDS = "<pad> <eos> <unk> a b c d e f g h i j k l m n o p q".split()


def tokenizer() -> Any:
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def texts(number: int, seed: int = 0, words: int = 6) -> list[str]:
    """Of lengths that differ."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(3, len(WORDS), (number, words), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in row[: words - n % 3]) for n, row in enumerate(drawn)]


def gpt() -> Any:
    """Not Llama, whose norms compute in float32."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(WORDS), n_positions=32, n_embd=32, n_layer=1, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def sharded(model: Any, compiled: bool = True) -> Any:
    example = {"input_ids": ids(), "labels": ids()} if compiled else None
    return autoshard.compile(model, autoshard.Mesh({"tp": 2}, "ideal_network"), (), example)


def ids() -> torch.Tensor:
    return torch.randint(3, len(WORDS), (4, 8), generator=torch.Generator().manual_seed(3))


def adapter(kind: str = "lora") -> Any:
    lora = {"r": 4, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
    if kind == "ia3":
        modules = ["c_attn", "c_fc"]
        return IA3Config(
            target_modules=modules, feedforward_modules=["c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"
        )
    if kind == "prompt":
        return PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    return LoraConfig(task_type="CAUSAL_LM", use_dora=kind == "dora", **lora)


SHARED = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.01,
    "optim": "sgd",
    "logging_steps": 1,
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "bf16": False,
    "dataloader_pin_memory": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
}


def trained(folder: str, place: Any, kind: str, compiled: bool = True, adapted: bool = False, **options: Any) -> Any:
    """The losses and weights of a trainer of TRL; with ``save_steps`` those after it was resumed from there, too."""
    resumed = "save_steps" in options
    found = []
    for again in range(1 + resumed):
        model, others = place(gpt(), compiled), {}
        if kind == "sft":
            arguments: Any = SFTConfig(folder, max_length=16, pad_to_multiple_of=8, **SHARED | options)
            rows: Any = {"text": texts(12)}
        elif kind == "dpo":
            arguments = DPOConfig(folder, max_length=16, pad_to_multiple_of=8, **SHARED | options)
            rows = {name: texts(12, n) for n, name in enumerate(("prompt", "chosen", "rejected"))}
            others = {} if adapted else {"ref_model": place(gpt(), compiled)}
        else:
            arguments = GRPOConfig(folder, max_completion_length=3, num_generations=4, **SHARED | options)
            rows, others = {"prompt": texts(12)}, {"reward_funcs": reward}
        if adapted:
            others["peft_config"] = adapter()
        trainer = KINDS[kind](
            model=model, args=arguments, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer(), **others
        )
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if again else None)
        found.append({"told": told(trainer), "weights": weights(trainer.model)})
    for name, values in found[0]["weights"].items():
        assert found[-1]["weights"][name] == pytest.approx(values, rel=1e-9, abs=1e-12), name
    return found[-1]


def reward(completions: list[str], **_: Any) -> list[float]:
    """Some number of a text."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def told(trainer: Any) -> list[dict[str, float]]:
    log = trainer.state.log_history
    return [{k: v for k, v in e.items() if not any(w in k for w in ("time", "second", "runtime"))} for e in log]


def weights(model: Any) -> dict[str, list[float]]:
    base = next((m for m in model.modules() if isinstance(m, autoshard.ShardedModule)), None)
    full = (lambda x: x) if base is None else base._full
    return {n: full(x.detach()).flatten().tolist() for n, x in model.state_dict(keep_vars=True).items()}


def tuned(folder: str, place: Any, kind: str, order: str) -> Any:
    """Losses of three steps, with and without the adapter; what is merged, saved and loaded."""
    torch.manual_seed(1)
    if order == "before":
        model = place(get_peft_model(gpt(), adapter(kind)))
    else:
        model = get_peft_model(place(gpt(), order == "compiled"), adapter(kind))
    batch = {"input_ids": ids(), "labels": ids()}
    losses = [float(model(**batch).loss)]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with model.disable_adapter(), torch.no_grad():
        losses.append(float(model(**batch).loss))
    losses.append(float(model(**batch).loss))
    model.save_pretrained(folder)
    saved = {n: x.flatten().tolist() for n, x in load_file(f"{folder}/adapter_model.safetensors").items()}
    found = {"losses": losses, "saved": saved, "weights": weights(model)}
    if order != "before":
        again = PeftModel.from_pretrained(place(gpt(), order == "compiled"), folder)
        found["loaded"] = float(again(**batch).loss)
    if kind != "prompt":
        if place is sharded:
            with pytest.raises(CaptureError, match="Use merge_and_unload"):
                model.merge_adapter()
        merged = model.merge_and_unload()
        assert not isinstance(merged, autoshard.ShardedModule)
        found["merged"] = {n: x.flatten().tolist() for n, x in merged.state_dict().items()}
    return found


class Doubles:
    """torch for TRL's head, which computes in float32 whatever the weights are."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


KINDS: dict[str, Any] = {"sft": SFTTrainer, "dpo": DPOTrainer, "grpo": GRPOTrainer}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sft": (trained, {"kind": "sft"}),
    "sft_first": (trained, {"kind": "sft", "compiled": False}),
    "sft_checkpointed": (trained, {"kind": "sft", "gradient_checkpointing": True}),
    "sft_packed": (trained, {"kind": "sft", "packing": True}),
    "sft_resumed": (trained, {"kind": "sft", "save_strategy": "steps", "save_steps": 2}),
    "sft_adapted": (trained, {"kind": "sft", "adapted": True}),
    "sft_adapted_first": (trained, {"kind": "sft", "adapted": True, "compiled": False}),
    "sft_adapted_resumed": (trained, {"kind": "sft", "adapted": True, "save_strategy": "steps", "save_steps": 2}),
    "dpo": (trained, {"kind": "dpo"}),
    "dpo_adapted": (trained, {"kind": "dpo", "adapted": True}),
    "grpo": (trained, {"kind": "grpo"}),
    "grpo_adapted": (trained, {"kind": "grpo", "adapted": True}),
    **{
        f"{kind}_{order}": (tuned, {"kind": kind, "order": order})
        for kind in ("lora", "dora", "ia3", "prompt")
        for order in ("before", "after", "compiled")
        if (kind, order) != ("prompt", "before")  # its prompts could not be saved
    },
}


def outcome(name: str, folder: str, whole: bool) -> dict[str, Any]:
    """A case with the whole model or the sharded one."""
    run, options = CASES[name]
    chunked_logprob.torch = Doubles()
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    found: dict[str, Any] = run(f"{folder}/{name}", (lambda model, _=True: model) if whole else sharded, **options)
    return found


def main(rank: int, ranks: int, rendezvous: str, result: str) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    world.join(rendezvous, rank, ranks)
    found = {name: outcome(name, str(Path(result).parent), whole=False) for name in sys.argv[4].split(",")}
    if rank == 0:
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    world.main(main)
