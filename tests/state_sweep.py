"""The cases of states in micro-batches and in stages: the unsharded model's results there, too, or what WAYS says."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import ideal
from state_cases import CASES
from torch import nn

import autoshard

MICRO_BATCHES = "micro_batches"
WAYS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    MICRO_BATCHES: ({"tp": 2}, {MICRO_BATCHES: 2}),
    "stages": ({"pp": 2}, {"stages": "pp"}),
}
"""name → mesh, options of compile"""

COUNTS = {
    "a_train_of_the_models_own": 5,
    "draws_and_buffers_are_those_of_the_forward": 5,
    "a_buffer_written_before_the_backward": 5,
    "parts_of_fused_projections_stay_cut": 3,
    "weights_cut_in_every_part_are_clipped_saved_and_loaded": 3,
}
"""micro-batches of cases whose batches are odd"""


@contextlib.contextmanager
def asking(way: str, name: str) -> Iterator[autoshard.Mesh]:
    """Inside, every ``autoshard.compile`` asks for micro-batches or stages; of the former batch norms are layer norms."""
    axes, options = WAYS[way]
    compile_, norm = autoshard.compile, nn.BatchNorm1d
    if way == MICRO_BATCHES:
        options = {MICRO_BATCHES: COUNTS.get(name, 2)}
        nn.BatchNorm1d = nn.LayerNorm  # type: ignore[assignment, misc]
    autoshard.compile = lambda *args, **kwargs: compile_(*args, **{**options, **kwargs})  # type: ignore[assignment]
    try:
        yield ideal(axes)
    finally:
        autoshard.compile, nn.BatchNorm1d = compile_, norm  # type: ignore[misc]
        torch.set_default_dtype(torch.float32)


def run(way: str, name: str) -> None:
    """Raises where the case differs from the unsharded model."""
    with asking(way, name) as mesh:
        CASES[name](mesh)


NO_LOSS = "a scalar that carries a gradient"
LATER = "create_graph=True: gradients of a step of micro-batches or stages have no derivative"
DETACHED = r"assert ours\.requires_grad == theirs\.requires_grad"
WRITTEN = "the forward writes into its input '(x|cache)' in place; return the new value"
COUNTED = r"assert (not any\(c\.kind == \"all_gather\"|counted)"
"""of collectives: a step of micro-batches sums once in each call, and a stage on one rank has none"""
PLANNED = r"(in c\.reason for c in sharded\.plan|layouts\[|type\(cache\[0\]\[0\]\) is not torch\.Tensor)"
"""layouts that are not those of one batch on {tp: 2}"""

_WITHOUT_LOSS = (
    *(
        "a_loss_outside_of_the_model",
        "outputs_read",
        "full_weights_loaded",
        "optimizers_of_torch",
        "two_threads_at_once",
    ),
    *("an_autograd_function_of_ones_own", "flex_attention_as_it_is_and_compiled", "a_value_that_is_overwritten"),
    *("integers_of_every_width", "inputs_that_are_not_dense", "inputs_of_another_dtype_or_device", "the_default_dtype"),
    *("a_state_set_anew_in_the_forward", "a_sparse_buffer", "a_meta_model_with_computed_buffers"),
)
_ANYWAY = {
    **dict.fromkeys(_WITHOUT_LOSS, NO_LOSS),
    **dict.fromkeys(("accumulation_with_no_sync", "hybrid_sharding_with_no_sync"), COUNTED),
    "two_threads_at_once": "'PlanError' object has no attribute",  # as NO_LOSS, in the threads
    "outputs_require_what_eagers_do": DETACHED,
    "gradients_of_gradients": LATER,
    "an_input_written_in_the_forward": WRITTEN,
}
_UNDIVIDED = (
    *("copied", "compiled_by_torch", "inference_mode_first", "grouped_products_in_float32"),
    *("frozen_but_for_the_head_and_unfrozen", "frozen_from_the_beginning"),
)
_RECURRENT = (
    *("autocast_around_the_call", "autocast_on_whole_tensors_is_eagers_bit_for_bit", "autocast_in_evaluation"),
)
OTHERWISE: dict[str, dict[str, str]] = {
    MICRO_BATCHES: {
        **_ANYWAY,
        **dict.fromkeys(_UNDIVIDED, "does not divide into 2. Choose a number of micro-batches that divides the batch"),
        **dict.fromkeys(_RECURRENT, "in gru .* needs .* of the whole batch in the middle of the model"),
        "attention_kernels_and_matmul_precision": NO_LOSS,
        "local_inputs": PLANNED,
        "a_written_buffer_that_is_to_be_cut": "matches no parameter, buffer",  # there is no batch norm
    },
    "stages": {
        **_ANYWAY,
        **dict.fromkeys(("local_inputs", "outputs_fed_back", "text_generated_by_transformers"), COUNTED),
        **dict.fromkeys(("rows_travel_to_their_experts", "windows_beside_padding"), PLANNED),
        "experts_in_modules_lie_whole_on_one_rank": "assert owners",
        **dict.fromkeys(
            ("parts_of_fused_projections_stay_cut", "a_cache_of_ones_own", "a_cache_handed_in_and_out"), PLANNED
        ),
        **dict.fromkeys(("a_buffer_that_is_returned", "another_default_dtype_inside"), "Ask for fewer stages"),
        "tensors_of_others_are_written": "this call reads parameters of 1 of the 2 stages",
        "local_inputs_that_do_not_fit": "DID NOT RAISE HintError",  # there is no axis that inputs are cut by
        "a_cache_given_as_an_argument": WRITTEN,
        "attention_kernels_and_matmul_precision": "stages='pp': the mesh has the axes tp",
    },
}
"""way → case → what it says instead of going through: refusals, and what a plan for it does not have"""


IN_PROCESSES = (
    "plans_for_local_inputs",
    "copied",
    "copied_before_it_is_compiled",
    "averaged",
    "pickled",
    "wrapped_in_ddp",
    "wrapped_forward",
    "loaded_from_files",
    "optimizer_states_of_one_device",
    "fused_steps_on_gradients_that_lie_otherwise",
    "each_rank_sums_its_own_experts",
    "frozen_but_for_the_head_and_unfrozen",
    "frozen_from_the_beginning",
    "all_frozen_records_nothing",
    "modes_of_parts",
    "a_train_of_the_models_own",
    "an_eval_forward_then_train_then_backward",
    "an_eval_model_has_gradients",
    "training_false_records_nothing",
    "checkpointed",
    "inference_mode_first",
    "an_autograd_function_that_draws_or_writes",
    "grouped_products_in_float32",
    "two_threads_at_once",
    "a_state_that_grows",
    "a_cache_whose_old_value_is_read",
    "a_written_buffer_that_is_to_be_cut",
    "an_optimizer_made_before",
    "hooks_of_parts",
    "autocast_on_whole_tensors_is_eagers_bit_for_bit",
    "autocast_in_evaluation",
    "deterministic_algorithms",
    "autocast_around_the_call",
    "another_default_device_around_the_first_call",
    "transforms_are_refused",
)
"""cases that hold in stages, a process each, as they are: others look at tensors that lie in one stage"""


def outcome(way: str, name: str) -> str:
    """Nothing where the case goes through; else the error, and the line of the case."""
    try:
        run(way, name)
    except (Exception, pytest.fail.Exception) as error:
        where = [f for f in traceback.extract_tb(error.__traceback__) if f.name == name]
        return "\n".join((f"{type(error).__name__}: {error}", *(f.line or "" for f in where)))
    return ""
