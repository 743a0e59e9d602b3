"""Training loops as people have them, for one device; SHARDED lists the lines that change. See test_loops_gloo.py.

Each function is a script: it gets a folder of its rank, and returns what it logs and its final weights.
"""

from __future__ import annotations

import copy
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autoshard

WORDS, LENGTH = 16, 8


class Block(nn.Module):
    """Causal attention and an MLP, with norms before."""

    def __init__(self, width: int, heads: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(norm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """nanoGPT's: a tied head; logits and, with targets, the loss."""

    def __init__(self, tied: bool = True, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, 8), nn.Embedding(LENGTH, 8)
        self.h, self.ln_f = nn.ModuleList(Block(8, 2, norm) for _ in range(2)), norm(8)
        self.lm_head = nn.Linear(8, WORDS, bias=False)
        if tied:
            self.wte.weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    def configure_optimizers(self, weight_decay: float, learning_rate: float) -> torch.optim.Optimizer:
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


class Net(nn.Module):
    """A small convolutional classifier with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(F.relu(self.bn(self.conv(x))).mean((2, 3)))


class Encoder(nn.Module):
    """As sentence-transformers': tokens to a normalised mean, by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.block = nn.Embedding(WORDS, 8), Block(8, 2, nn.LayerNorm)

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        mask = features["attention_mask"].unsqueeze(-1).to(torch.float64)
        x = self.block(self.embeddings(features["input_ids"]))
        return {**features, "sentence_embedding": F.normalize((x * mask).sum(1) / mask.sum(1).clamp(min=1e-9), dim=1)}


class RankingLoss(nn.Module):
    """MultipleNegativesRankingLoss: the other rows of a batch are the negatives."""

    def __init__(self, model: nn.Module, scale: float = 20.0) -> None:
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, sentence_features: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        a, b = (self.model(features)["sentence_embedding"] for features in sentence_features)
        return F.cross_entropy(a @ b.T * self.scale, torch.arange(len(a)))


def texts(rows: int, seed: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def images(rows: int, batches: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    for _ in range(batches):
        yield (
            torch.randn(rows, 3, 6, 6, dtype=torch.float64, generator=drawn),
            torch.randint(0, 6, (rows,), generator=drawn),
        )


def nanogpt(out_dir: str) -> Any:
    max_iters, eval_interval, eval_iters, gradient_accumulation_steps = 6, 2, 2, 2
    learning_rate, min_lr, warmup_iters, grad_clip = 6e-3, 6e-4, 2, 1.0

    def get_batch(split: str, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        data = texts(4, 100 * (split == "val") + at)
        return data[:, :-1].contiguous(), data[:, 1:].contiguous()

    @torch.no_grad()
    def estimate_loss() -> dict[str, float]:
        out = {}
        model.eval()
        for split in ["train", "val"]:
            losses = torch.zeros(eval_iters, dtype=torch.float64)
            for k in range(eval_iters):
                X, Y = get_batch(split, k)
                with ctx:
                    _, loss = model(X, Y)
                losses[k] = loss.item()
            out[split] = losses.mean().item()
        model.train()
        return out

    def get_lr(it: int) -> float:
        if it < warmup_iters:
            return learning_rate * (it + 1) / (warmup_iters + 1)
        ratio = (it - warmup_iters) / (max_iters - warmup_iters)
        return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)

    ctx, log = nullcontext(), []
    for resume in (False, True):
        torch.manual_seed(1337)
        model = GPT().double()
        optimizer = model.configure_optimizers(0.1, learning_rate)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        iter_num = 0
        if resume:
            checkpoint = torch.load(f"{out_dir}/ckpt.pt")
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            iter_num = checkpoint["iter_num"]
        while iter_num < max_iters:
            lr = get_lr(iter_num)
            for param_group in optimizer.param_groups:
                param_group["lr"] = lr
            if iter_num % eval_interval == 0:
                log.append(estimate_loss())
                if iter_num == 4 and not resume:
                    raw_model = model
                    checkpoint = {"model": raw_model.state_dict(), "iter_num": iter_num}
                    checkpoint["optimizer"] = optimizer.state_dict()
                    torch.save(checkpoint, f"{out_dir}/ckpt.pt")
                    break
            for micro_step in range(gradient_accumulation_steps):
                with ctx:
                    _, loss = model(*get_batch("train", iter_num * gradient_accumulation_steps + micro_step))
                    loss = loss / gradient_accumulation_steps
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            log.append({"loss": loss.item()})
            iter_num += 1
    return log, model.state_dict()


def timm(out_dir: str) -> Any:
    torch.manual_seed(0)
    model = Net().double()
    model_ema = copy.deepcopy(model).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    accum_steps, log = 2, []
    drawn = torch.Generator().manual_seed(5)

    @torch.no_grad()
    def update_ema(decay: float = 0.9) -> None:
        for ema_v, model_v in zip(model_ema.state_dict().values(), model.state_dict().values(), strict=True):
            if ema_v.is_floating_point():
                ema_v.lerp_(model_v, weight=1.0 - decay)
            else:
                ema_v.copy_(model_v)

    model.train()
    for index, (image, target) in enumerate(images(8, 8)):
        lam = float(torch.rand((), generator=drawn))
        one_hot = F.one_hot(target, 6).double() * 0.9 + 0.1 / 6
        image, target = image * lam + image.flip(0) * (1 - lam), one_hot * lam + one_hot.flip(0) * (1 - lam)
        output = model(image)
        loss = torch.sum(-target * F.log_softmax(output, dim=-1), dim=-1).mean()
        (loss / accum_steps).backward()
        log.append(loss.item() * image.size(0))
        if (index + 1) % accum_steps == 0:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            log.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
            update_ema()
            lr_scheduler.step()
    with torch.no_grad():
        for module in (model.eval(), model_ema):
            for image, target in images(7, 2):
                output = module(image)
                log += [F.cross_entropy(output, target).item(), (output.argmax(1) == target).sum().item()]
    return log, model_ema.state_dict()


def torchvision(out_dir: str) -> Any:
    def set_weight_decay(module: nn.Module, decay: float) -> list[dict[str, Any]]:
        found: dict[str, list[Any]] = {"other": [], "norm": []}

        def add(part: nn.Module) -> None:
            for p in part.parameters(recurse=False):
                found["norm" if isinstance(part, nn.BatchNorm2d | nn.LayerNorm) else "other"].append(p)
            for child in part.children():
                add(child)

        add(module)
        return [{"params": found["other"], "weight_decay": decay}, {"params": found["norm"], "weight_decay": 0.0}]

    def accuracy(output: torch.Tensor, target: torch.Tensor, topk: tuple[int, ...]) -> list[float]:
        with torch.inference_mode():
            _, pred = output.topk(max(topk), 1, True, True)
            correct = pred.t().eq(target[None])
            return [(correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / target.size(0))).item() for k in topk]

    torch.manual_seed(0)
    model = Net().double()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.RMSprop(set_weight_decay(model, 1e-2), lr=1e-2, momentum=0.9, eps=0.0316, alpha=0.9)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=1)
    step_lr = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, step_lr], milestones=[1])
    model_ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    log = []
    for epoch in range(3):
        model.train()
        for i, (image, target) in enumerate(images(8, 3)):
            output = model(image)
            loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if i % 2 == 0:
                model_ema.update_parameters(model)
                if epoch < 1:
                    model_ema.n_averaged.fill_(0)
            log += [loss.item(), *accuracy(output, target, (1, 5))]
        scheduler.step()
        for module in (model, model_ema):
            module.eval()
            with torch.inference_mode():
                for image, target in images(5, 2):
                    output = module(image)
                    log += [criterion(output, target).item(), *accuracy(output, target, (1, 5))]
        checkpoint = {
            "model": model.state_dict(),
            "lr_scheduler": scheduler.state_dict(),
            "epoch": epoch,
        }
        torch.save(checkpoint, f"{out_dir}/checkpoint.pth")
    return log, torch.load(f"{out_dir}/checkpoint.pth")["model"]


def nanochat(out_dir: str) -> Any:
    torch.manual_seed(42)
    model = GPT(tied=False, norm=nn.RMSNorm).double()
    matrices = [p for p in model.h.parameters() if p.ndim == 2]
    others = [p for n, p in model.named_parameters() if not (n.startswith("h.") and p.ndim == 2)]
    optimizers = [
        torch.optim.AdamW(others, lr=0.02, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0),
        torch.optim.SGD(matrices, lr=0.02, momentum=0.95, nesterov=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    num_iterations, grad_accum_steps, log, smooth_train_loss = 5, 2, [], 0.0
    for step in range(num_iterations + 1):
        last_step = step == num_iterations
        if last_step or step % 2 == 0:
            model.eval()
            with torch.no_grad():
                logits, _ = model(texts(3, 50)[:, :-1].contiguous())
                losses = F.cross_entropy(logits.flatten(0, 1), texts(3, 50)[:, 1:].flatten(), reduction="none")
            log.append((losses.sum() / math.log(2) / losses.numel()).item())
            model.train()
        if last_step:
            break
        labels = [texts(4, 2 * step + i)[:, 1:].clone() for i in range(grad_accum_steps)]
        labels[1][:, : step + 1] = -1
        valid = sum(int((y != -1).sum()) for y in labels)
        for i, y in enumerate(labels):
            logits, _ = model(texts(4, 2 * step + i)[:, :-1].contiguous())
            loss = F.cross_entropy(logits.flatten(0, 1).float().double(), y.flatten(), ignore_index=-1, reduction="sum")
            train_loss = loss.detach()
            (loss / valid).backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        log.append(grad_norm.item())
        lrm = 1.0 if step < 3 else (num_iterations - step) / 2
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * lrm
            optimizer.step()
        model.zero_grad(set_to_none=True)
        smooth_train_loss = 0.9 * smooth_train_loss + 0.1 * train_loss.item()
        log.append(smooth_train_loss / (1 - 0.9 ** (step + 1)))
    return log, model.state_dict()


def sentence_transformers(out_dir: str) -> Any:
    torch.manual_seed(0)
    model = Encoder().double()
    loss_model = RankingLoss(model)
    no_decay = ["bias", "norms.0.weight", "norms.1.weight"]
    named = list(loss_model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2))
    log = []

    def collate(seed: int) -> dict[str, torch.Tensor]:
        ids = texts(6, seed)[:, :LENGTH].contiguous()
        return {"input_ids": ids, "attention_mask": (torch.arange(LENGTH) < 3 + torch.arange(6)[:, None]).long()}

    for step in range(5):
        loss_model.zero_grad()
        loss_model.train()
        loss_value = loss_model([collate(2 * step), collate(2 * step + 1)])
        loss_value.backward()
        torch.nn.utils.clip_grad_norm_(loss_model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        log.append(loss_value.item())
    model.eval()
    with torch.no_grad():
        embeddings = [model(collate(seed))["sentence_embedding"].cpu().numpy() for seed in (90, 91)]
    log += (embeddings[0] @ embeddings[1].T).argmax(1).tolist() + embeddings[0].sum(1).tolist()
    return log, model.state_dict()


def ignite(out_dir: str) -> Any:
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.handlers import Checkpoint, DiskSaver, EMAHandler, PiecewiseLinear, TerminateOnNan
    from ignite.metrics import Accuracy, Loss, RunningAverage

    torch.manual_seed(0)
    model = Net().double()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = create_supervised_trainer(model, optimizer, criterion, gradient_accumulation_steps=2)
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy(), "nll": Loss(criterion)})
    RunningAverage(output_transform=lambda x: x).attach(trainer, "loss")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    trainer.add_event_handler(Events.ITERATION_STARTED, PiecewiseLinear(optimizer, "lr", [(0, 0.1), (9, 0.01)]))
    ema = EMAHandler(model, momentum=0.1)
    ema.attach(trainer, name="ema_momentum", event=Events.ITERATION_COMPLETED)
    to_save = {"model": model}
    saver = Checkpoint(to_save, DiskSaver(out_dir, require_empty=False), n_saved=1, filename_pattern="last.pt")
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
    log = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def log_training_loss(trainer: Any) -> None:
        log.extend([trainer.state.output, trainer.state.metrics["loss"]])

    @trainer.on(Events.EPOCH_COMPLETED)
    def log_validation_results(trainer: Any) -> None:
        evaluator.run([*images(5, 2)])
        log.extend([evaluator.state.metrics["accuracy"], evaluator.state.metrics["nll"]])

    trainer.run([*images(8, 4)], max_epochs=2)
    return log, ema.ema_model.state_dict()


LOOPS: dict[str, Callable[[str], Any]] = {
    f.__name__: f for f in (nanogpt, timm, torchvision, nanochat, sentence_transformers, ignite)
}

MESH = 'autoshard.Mesh({"dp": 2}, "ideal_network")'
FULL = ("model.state_dict()\n", "model.full_state_dict()\n")
SHARDED: dict[str, tuple[tuple[str, str], ...]] = {
    "nanogpt": (
        ("model = GPT().double()\n", f'model = autoshard.compile(GPT().double(), {MESH}, get_batch("val", 0))\n'),
        ("raw_model.state_dict()", "raw_model.full_state_dict()"),
        ("= optimizer.state_dict()", "= autoshard.full_optimizer_state_dict(model, optimizer)"),
        FULL,
    ),
    "timm": (
        ("Net().double()\n", f"autoshard.compile(Net().double(), {MESH}, (next(images(8, 1))[0],), like='fsdp')\n"),
        ("model_ema.state_dict()\n", "model_ema.full_state_dict()\n"),
    ),
    "torchvision": (
        ("Net().double()\n", f"autoshard.compile(Net().double(), {MESH}, (next(images(8, 1))[0],))\n"),
        ('"model": model.state_dict()', '"model": model.full_state_dict()'),
    ),
    "nanochat": (
        (
            "norm=nn.RMSNorm).double()\n",
            f"norm=nn.RMSNorm).double()\n    model = autoshard.compile(model, {MESH}, "
            "(texts(4, 0)[:, :-1].contiguous(),), like='fsdp')\n",
        ),
        FULL,
    ),
    "sentence_transformers": (
        (
            "Encoder().double()\n",
            "autoshard.compile(Encoder().double(), autoshard.Mesh({'tp': 2}, 'ideal_network'), "
            "({'input_ids': texts(6, 0)[:, :LENGTH].contiguous(), 'attention_mask': torch.ones(6, LENGTH).long()},))\n",
        ),
        FULL,
    ),
    "ignite": (
        ("Net().double()\n", f"autoshard.compile(Net().double(), {MESH}, (next(images(8, 1))[0],), like='fsdp')\n"),
        ('{"model": model}', '{"model": SimpleNamespace(state_dict=model.full_state_dict)}'),
        ("ema_model.state_dict()\n", "ema_model.full_state_dict()\n"),
    ),
}
"""loop → (text of the script for one device, text in its place); each stands in one line"""


def script(name: str, sharded: bool) -> str:
    """The source of a loop, for one device or sharded. Each change must apply once."""
    text = textwrap.dedent(inspect.getsource(LOOPS[name]))
    for old, new in SHARDED[name] if sharded else ():
        assert text.count(old) == 1, (name, old)
        text = text.replace(old, new)
    return text


def run(name: str, folder: str, sharded: bool) -> Any:
    """(what is logged, weights) of a loop, as lists."""
    space = {**globals(), "SimpleNamespace": SimpleNamespace, "autoshard": autoshard}
    exec(compile(script(name, sharded), f"{name}.py", "exec"), space)
    log, weights = space[name](folder)
    return {"log": log, "weights": {n: w.tolist() for n, w in weights.items() if w.is_floating_point()}}
