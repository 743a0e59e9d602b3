"""The scripts of docs/examples, as a reader would run them; accelerate."""

from __future__ import annotations

import copy
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import autoshard

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def run(*command: str) -> str:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # Unbuffered: the ranks' lines come in the order of the collectives between them, not rank by rank.
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def evaluations(text: str) -> list[str]:
    # Digits only: an unbuffered print writes its line's end apart, so another rank's line may follow at once.
    return re.findall(r"evaluation: (\d+\.\d+)", text)


@pytest.mark.slow
def test_trainer_stopped_and_resumed_on_another_mesh(tmp_path: Path) -> None:
    """Two ranks, then four in one process; the same as transformers' own Trainer with the plain model."""
    script = str(ROOT / "docs" / "examples" / "trainer.py")
    half = evaluations(run(*TORCHRUN, script, str(tmp_path / "a"), "--steps", "4"))
    resumed = evaluations(run(script, str(tmp_path / "a"), "--steps", "8", "--resume"))
    whole = evaluations(run(script, str(tmp_path / "b"), "--steps", "8", "--whole"))
    assert half[0] == half[1] != resumed[0]
    assert resumed == whole


@pytest.mark.slow
def test_trainer_counts_a_shared_batch_once(tmp_path: Path) -> None:
    """Tokens, FLOPs and the divisor of the loss, which ranks sum; as transformers' own Trainer counts on one device."""
    script = str(ROOT / "tests" / "distributed" / "trainer_counts.py")
    texts = (
        run(*TORCHRUN, script, str(tmp_path / "a")),
        run(script, str(tmp_path / "b")),
        run(script, str(tmp_path), "whole"),
    )
    both, alone, whole = (json.loads(text.split("counts:")[1].splitlines()[0]) for text in texts)
    assert len({expected["tokens"] for expected in whole}) == 2
    for found, expected in zip(both + alone, whole * 2, strict=True):
        assert (found["tokens"], found["flos"]) == (expected["tokens"], expected["flos"])
        assert found["told"] == pytest.approx(expected["told"], rel=1e-5)
        assert found["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--disjoint"]], ids=["same ranks", "disjoint"])
def test_reinforcement_learning(options: list[str]) -> None:
    """The reward grows, so the generator has the trained weights; each rank receives what it lacks, and no more."""
    script = str(ROOT / "docs" / "examples" / "rl.py")
    text = run(*TORCHRUN[:-1], "4", script, *options)
    before, after = map(float, re.findall(r"reward: (\d+\.\d+) → (\d+\.\d+)", text)[0])
    assert after > before + 0.5
    assert "every byte was received once" in text


@pytest.mark.slow
def test_finetune(tmp_path: Path) -> None:
    """In one process and on two ranks: the evaluation improves, alike to the rounding of bfloat16; weights are saved."""
    script = str(ROOT / "docs" / "examples" / "finetune.py")
    alone = [float(e) for e in evaluations(run(script, str(tmp_path / "a.pt")))]
    both = [float(e) for e in evaluations(run(*TORCHRUN, script, str(tmp_path / "b.pt")))]
    assert alone[1] < alone[0]
    assert both[0] == both[1]
    assert both[::2] == pytest.approx(alone, abs=0.01)
    a, b = (torch.load(tmp_path / name) for name in ("a.pt", "b.pt"))
    assert a.keys() == b.keys() >= {"blocks.0.up.a", "blocks.0.up.base.weight"}
    torch.testing.assert_close(a["blocks.0.up.base.weight"], b["blocks.0.up.base.weight"], rtol=0, atol=0)


@pytest.mark.slow
def test_vision(tmp_path: Path) -> None:
    """In one process and on two ranks, each with its part of the batches and its own augmentation: both learn all."""
    script = str(ROOT / "docs" / "examples" / "vision.py")
    alone, both = run(script, str(tmp_path / "a.pt")), run(*TORCHRUN, script, str(tmp_path / "b.pt"))
    found = [float(e) for e in evaluations(alone) + evaluations(both)]
    assert len(found) == 3
    assert min(found) > 0.9
    a, b = (torch.load(tmp_path / name) for name in ("a.pt", "b.pt"))
    assert a.keys() == b.keys()
    assert a["body.1.norms.0.num_batches_tracked"] == b["body.1.norms.0.num_batches_tracked"] == 36


@pytest.mark.slow
def test_serving() -> None:
    """On two ranks, where requests share steps: each has the tokens that it has alone, on one device."""
    script = ROOT / "docs" / "examples" / "serving.py"
    alone = runpy.run_path(str(script))
    torch.manual_seed(0)
    model, wanted = alone["Decoder"]().eval(), []
    for number in range(7):
        prompt = torch.randint(0, alone["VOCABULARY"], (3 + 4 * number,)).tolist()
        wanted.append(alone["Request"](f"request {number}", prompt, new=4 + 3 * (number % 3)))
    for request in wanted:
        batcher = alone["Batcher"](model)
        batcher.add(request)
        while not batcher.step():
            pass
    text = run(*TORCHRUN, str(script))
    assert sorted(text.splitlines()[:7]) == [f"{r.name}: {r.made}" for r in wanted]
    assert "programs: 2" in text
    sent = [int(n) for n in re.findall(r"(\d+) B", text)]
    assert max(sent) == 3 * 64 * 4  # of an activation: nothing is sent for the cache, and no logits


def test_accelerate_leaves_a_sharded_module_as_it_is() -> None:
    """In one process: prepared with optimizer, loader and schedule, accumulated, clipped; the plain model's weights."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).double(), torch.randn(16, 8).double()
    sharded = autoshard.compile(copy.deepcopy(model), autoshard.Mesh({"tp": 2}, "ideal_network"), (x[:4],))
    for module in (model, sharded):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        prepared, optimizer, loader, schedule = accelerator.prepare(
            module, optimizer, DataLoader(x, batch_size=4), schedule
        )
        assert prepared is module
        for batch in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(batch).square().mean())
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    for name, weight in sharded.full_state_dict().items():
        torch.testing.assert_close(weight, model.state_dict()[name], rtol=1e-9, atol=1e-9)
