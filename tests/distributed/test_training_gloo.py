"""Training under torch.distributed: worlds of 2 and 4 gloo processes against the unsharded model, in float64.

One world per size runs all checks of training_worker.py, so that torch is imported once per process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

HERE = Path(__file__).parent
TRAINING = ("train_mlp", "train_gpt", "train_llama", "train_dlrm", "train_hf_llama", "train_hf_t5")
CONTRACT = (
    "wrong_reduction_is_seen",
    "parameters_are_dtensors",
    "only_shards_are_allocated",
    "outputs_next_to_a_loss_keep_their_layout",
    "inference_returns_full_tensors",
    "gathered_on_request_with_gradients",
    "gradients_through_sharded_logits",
    "clipping",
    "checkpoint",
    "full_state_dict_round_trip",
    "different_inputs_are_refused",
    "wrong_mesh_size",
    "device_mesh",
    "profiled",
    "one_program_for_all_lengths",
)
IN_BOTH = {
    "train_gpt",
    "train_llama",
    "parameters_are_dtensors",
    "only_shards_are_allocated",
    "outputs_next_to_a_loss_keep_their_layout",
    "clipping",
    "full_state_dict_round_trip",
    "different_inputs_are_refused",
}
"""what runs in the larger world, too, without --run-slow"""


def cases() -> list[object]:
    return [
        pytest.param(
            ranks, check, marks=[pytest.mark.slow] if ranks > 2 and check not in IN_BOTH else [], id=f"{ranks}-{check}"
        )
        for ranks in (2, 4)
        for check in (*TRAINING, *CONTRACT)
    ]


def environment() -> dict[str, str]:
    paths = [str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], str]:
    """What a check came to in the world of that many ranks: the empty string, or the first failing rank's traceback."""
    chosen = [item.callspec.params for item in request.session.items if item.function is test_training]
    known: dict[int, dict[str, str]] = {}

    def look_up(ranks: int, check: str) -> str:
        if ranks not in known:
            checks = [p["check"] for p in chosen if p["ranks"] == ranks]
            known[ranks] = run_world(ranks, checks, tmp_path_factory.mktemp("gloo"))
        return known[ranks][check]

    return look_up


def run_world(ranks: int, checks: list[str], folder: Path, worker: str = "training_worker.py") -> dict[str, str]:
    files = [str(folder / "rendezvous"), str(folder / "result.json"), ",".join(checks)]
    workers = [
        subprocess.Popen(
            [sys.executable, str(HERE / worker), str(r), str(ranks), *files],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(ranks)
    ]
    try:
        logs = [worker.communicate(timeout=270)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert not any(worker.returncode for worker in workers), "\n".join(logs)
    assert not any("Warning" in log for log in logs), "\n".join(logs)
    outcomes: dict[str, str] = json.loads((folder / "result.json").read_text())
    return outcomes


@pytest.mark.parametrize(("ranks", "check"), cases())
def test_training(outcome: Callable[[int, str], str], ranks: int, check: str) -> None:
    found = outcome(ranks, check)
    assert found == "", found


def run(*command: str) -> str:
    """Standard output of a Python command."""
    done = subprocess.run(
        [sys.executable, *command], env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(text: str) -> list[str]:
    return re.findall(r"loss (\S+)", text)


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def test_one_script_and_one_directory_for_python_and_torchrun(tmp_path: Path) -> None:
    """train_script.py saves its module and prints the losses of two steps; the saved directory repeats them."""
    script = str(HERE / "train_script.py")
    save_file(train_inputs(), tmp_path / "inputs.safetensors")
    alone = losses(run(script, str(tmp_path / "alone")))
    assert len(alone) == 2
    assert len(set(alone)) == 2, "the step changed nothing"
    assert losses(run(*TORCHRUN, script, str(tmp_path / "together"))) == alone
    for folder in ("alone", "together"):
        saved = {p.name for p in (tmp_path / folder).iterdir()}
        assert saved >= {"rank_module.py", "plan.json", "inputs.json", "rank0.safetensors", "rank1.safetensors"}
    options = ("--inputs", str(tmp_path / "inputs.safetensors"), "--steps", "2", "--lr", "0.01")
    assert losses(run(str(tmp_path / "together" / "rank_module.py"), *options)) == alone
    assert losses(run(*TORCHRUN, str(tmp_path / "alone" / "rank_module.py"), *options)) == alone


def train_inputs() -> dict[str, object]:
    from train_script import inputs

    tokens, labels = inputs()
    return {"tokens": tokens, "labels": labels}
