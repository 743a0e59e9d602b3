"""Training under torch.distributed: worlds of 2 and 4 gloo processes against the unsharded model, in float64.

One world per size runs all checks of training_worker.py, so that torch is imported once per process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import world
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
    "losses_are_computed_on_parts",
    "losses_go_back_as_of_plain_outputs",
    "losses_run_in_chunks",
    "clipping",
    "few_gradients_are_summed_last",
    "parameters_enter_ahead",
    "gradients_serve_again",
    "checkpoint",
    "full_state_dict_round_trip",
    "different_inputs_are_refused",
    "wrong_mesh_size",
    "device_mesh",
    "other_dtensors",
    "profiled",
    "one_program_for_all_lengths",
    "tables_of_one_owner",
    "every_rank_gets_the_whole_of_a_table",
    "full_states_of_torch",
    "sums_go_beside_tables",
    "jagged_bags_of_one_owner",
    "bags_of_all_modes",
    "sparse_rows_and_replicas",
    "tables_in_parts_and_lower_precision",
    "rows_are_sent_from_where_they_lie",
    "parts_of_one_move_as_one",
    "experts_of_one_owner",
    "gradients_of_experts_twice",
    "sums_without_a_ring",
    "random_walks",
    "a_model_names_its_own_plan",
)
SLOW = {
    "train_llama",
    "train_hf_llama",
    "train_hf_t5",
    "gathered_on_request_with_gradients",
    "losses_go_back_as_of_plain_outputs",
    "losses_run_in_chunks",
    "few_gradients_are_summed_last",
    "parameters_enter_ahead",
    "gradients_serve_again",
    "profiled",
    "one_program_for_all_lengths",
    "every_rank_gets_the_whole_of_a_table",
    "sums_go_beside_tables",
    "bags_of_all_modes",
    "sparse_rows_and_replicas",
    "tables_in_parts_and_lower_precision",
    "parts_of_one_move_as_one",
    "gradients_of_experts_twice",
    "random_walks",
    "train_gpt",
    "device_mesh",
    "other_dtensors",
    "full_states_of_torch",
    "jagged_bags_of_one_owner",
    "rows_are_sent_from_where_they_lie",
    "experts_of_one_owner",
    "a_model_names_its_own_plan",
    "gradients_through_sharded_logits",
}
"""what only --run-slow runs, as all in the larger world: others train, and in one process others check the same"""


def cases() -> list[object]:
    def marks(ranks: int, check: str) -> list[pytest.MarkDecorator]:
        return [pytest.mark.slow] * (ranks > 2 or check in SLOW)

    return [
        pytest.param(ranks, check, marks=marks(ranks, check), id=f"{ranks}-{check}")
        for ranks in (2, 4)
        for check in (*TRAINING, *CONTRACT)
    ]


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], str]:
    """What a check came to in the world of that many ranks: the empty string, or the first failing rank's traceback."""
    chosen = [item.callspec.params for item in request.session.items if item.function is test_training]
    known: dict[int, dict[str, str]] = {}

    def look_up(ranks: int, check: str) -> str:
        if ranks not in known:
            checks = [p["check"] for p in chosen if p["ranks"] == ranks]
            folder = tmp_path_factory.mktemp("gloo")
            known[ranks] = json.loads(world.start("training_worker.py", ranks, folder, ",".join(checks), timeout=270))
        return known[ranks][check]

    return look_up


@pytest.mark.parametrize(("ranks", "check"), cases())
def test_training(outcome: Callable[[int, str], str], ranks: int, check: str) -> None:
    found = outcome(ranks, check)
    assert found == "", found


def run(*command: str) -> str:
    """Standard output of a Python command."""
    done = subprocess.run(
        [sys.executable, *command], env=world.environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(text: str) -> list[str]:
    return re.findall(r"loss (\S+)", text)


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.mark.slow
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
