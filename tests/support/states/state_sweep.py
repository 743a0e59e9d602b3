"""The cases of states in micro-batches and in stages: the unsharded model's results there, too, or what WAYS says."""

from __future__ import annotations

import contextlib
import functools
import re
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
    asked = functools.wraps(compile_)(lambda *args, **kwargs: compile_(*args, **{**options, **kwargs}))
    autoshard.compile = asked  # type: ignore[assignment]
    try:
        yield ideal(axes)
    finally:
        autoshard.compile, nn.BatchNorm1d = compile_, norm  # type: ignore[misc]
        torch.set_default_dtype(torch.float32)


def run(way: str, name: str) -> None:
    """Raises where the case differs from the unsharded model."""
    with asking(way, name) as mesh:
        CASES[name](mesh)


def says(text: str, error: str = "PlanError") -> str:
    """A refusal that begins so, after the name of what was asked for."""
    return rf"{error}: (micro_batches=2: |2 stages: |stages: |)({text}).*"


def fails(line: str, text: str = "") -> str:
    """The assertion of a case on this line, with ``text``: of plans and counts that are not those of one batch."""
    return rf"AssertionError: {text}\n{re.escape(line)}[^\n]*"


NO_LOSS = says("no output of the model is a scalar that carries a gradient")
LATER = says("create_graph=True: with micro-batches or stages, gradients have no", "RuntimeMismatchError")
DETACHED = fails("assert ours.requires_grad == theirs.requires_grad")
WRITTEN = says("the forward writes to its input 'x' in place. Return the new value")
_SUMMED = 'assert counted["all_reduce", "backward"] == once["all_reduce", "backward"] > 0'

_WITHOUT_LOSS = (
    *(
        "a_gradient_that_is_given_and_used_again",
        "parameters_that_are_added",
        "a_loss_outside_of_the_model",
        "outputs_read",
        "full_weights_loaded",
        "optimizers_of_torch",
        "two_threads_at_once",
    ),
    *("an_autograd_function_of_ones_own", "flex_attention_as_it_is_and_compiled", "a_value_that_is_overwritten"),
    *("integers_of_every_width", "inputs_that_are_not_dense", "inputs_of_another_dtype_or_device", "the_default_dtype"),
    *("a_state_set_anew_in_the_forward", "a_sparse_buffer", "a_meta_model_with_computed_buffers", "functional_calls"),
    *("questions_about_torch_and_tensors", "gradients_turned_on_in_an_inference_mode_of_its_own"),
    *("what_a_call_leaves_for_the_next", "what_the_first_call_made", "a_checkpointed_output_in_parts"),
    *("hooks_on_outputs_that_others_are_computed_from", "options_that_are_changed_after_compile", "wrapped_forward"),
    *("pruned_after_compiling", "losses_outside_with_penalties", "statistics_computed_anew", "looked_at"),
    *("dropout_per_shard", "modules_called_alone", "parts_of_outputs_of_which_not_all_are_used", "outputs_written_to"),
    *("outputs_that_share_memory", "label_smoothing_of_transformers", "gradients_of_functions_of_outputs"),
    "views_of_parameters_that_were_written_since",
)
_ANYWAY = {
    **dict.fromkeys(_WITHOUT_LOSS, NO_LOSS),
    "two_threads_at_once": says(
        "'PlanError' object has no attribute 'detach'", "AttributeError"
    ),  # NO_LOSS, in the threads
    "outputs_require_what_eagers_do": DETACHED,
    "gradients_of_gradients": LATER,
    "an_input_written_in_the_forward": WRITTEN,
    "a_number_read_from_a_buffer_that_counts": r"CaptureError: state_decided.py:\d+: a buffer of the model that controls.*",
}
_UNDIVIDED = (
    *("copied", "compiled_by_torch", "inference_mode_first", "grouped_products_in_float32"),
    *("frozen_but_for_the_head_and_unfrozen", "frozen_from_the_beginning"),
)
_OPEN = ("classes_of_tensors_and_numbers", "rules_of_ones_own", "a_dict_that_hooks_change")
_RECURRENT = (
    *("autocast_around_the_call", "autocast_on_whole_tensors_is_eagers_bit_for_bit", "autocast_in_evaluation"),
)
OTHERWISE: dict[str, dict[str, str]] = {
    MICRO_BATCHES: {
        **_ANYWAY,
        **dict.fromkeys(
            _UNDIVIDED, says(r"input '\w+' has shape \S+( 3\])?, and its batch of [35] does not divide into 2")
        ),
        **dict.fromkeys(_RECURRENT, says(r"aten.\S+ in gru at state_torch.py:\d+ needs \w+ of the full batch")),
        **dict.fromkeys(_OPEN, says("micro_batches=2 with open lengths")),
        "attention_kernels_and_matmul_precision": NO_LOSS,
        "accumulation_with_no_sync": fails(_SUMMED, r"Counter.*'all_reduce', 'backward'\): 3.*"),  # in every call
        "hybrid_sharding_with_no_sync": fails(_SUMMED, r".*\('all_reduce', 'backward'\): 3}.*'backward'\): 1}\)\)"),
        "local_inputs": fails('assert "S(0)" in str(sharded.plan.layouts["ids"])'),  # rows of the whole
        "a_buffer_that_decides_and_is_set": says(r"aten.sub.Tensor in \(root\) at \S+ needs mean_result"),
        # There is no batch norm.
        "a_written_buffer_that_is_to_be_cut": says("hint 'bn.running_mean' matches no parameter, buffer", "HintError"),
    },
    "stages": {
        **_ANYWAY,
        # A stage on one rank has no collectives, and all of its tensors are whole.
        "accumulation_with_no_sync": fails(_SUMMED, r"Counter\(\)"),
        "hybrid_sharding_with_no_sync": fails('assert counted["reduce_scatter", "backward"] == 3 * once['),
        "local_inputs": fails('assert not any(c.kind == "all_gather" for c in sharded.collectives)'),  # between stages
        "outputs_fed_back": fails("assert counted == {", r"\(0, Counter\(\)\)"),
        "text_generated_by_transformers": fails('assert counted == {("all_reduce", "forward"): 2 + 1}'),
        "a_prompt_of_one_request_along_its_sequence": fails('assert prompt["reduce_scatter", "forward"] >= 2'),
        "rows_travel_to_their_experts": fails('assert any("experts" in c.reason and', "Routed on .* mesh pp=2.*"),
        "windows_beside_padding": fails('assert any("keys and values, hop 1" in', "Windowed on .* mesh pp=2.*"),
        "parts_of_fused_projections_stay_cut": fails('assert tuple(layouts["qkv.weight"].grouped) =='),
        "a_cache_of_ones_own": fails("assert {str(sharded.plan.layouts["),
        "a_cache_handed_in_and_out": fails("assert type(cache[0][0]) is not torch.Tensor"),
        "activations_on_the_host": says("offload='activations': activations of pipeline stages are not offloaded"),
        "a_buffer_that_is_returned": says("the model has only 1 operations to split between"),
        "a_dict_that_hooks_change": says("stage 0 would have no operation of its own"),
        "another_default_dtype_inside": says("stage 0 would have no operation of its own"),
        # The whole is compiled first there: only it knows where the stages are cut.
        "an_encoder_called_before_the_whole": fails("assert (len(sharded.programs), len(encoder.programs)) == "),
        # There is no axis that inputs are cut by.
        "local_inputs_that_do_not_fit": says("DID NOT RAISE HintError", "Failed"),
        "experts_in_modules_lie_whole_on_one_rank": fails("assert owners"),
        "attention_kernels_and_matmul_precision": says(
            "stages='pp' is not an axis of the mesh. Its axes: tp", "MeshError"
        ),
    },
}
"""way → case → a pattern of all that :func:`outcome` says: refusals, and what a plan for it does not have"""


IN_PROCESSES = (
    "a_buffer_that_decides_and_is_set",
    "plans_for_local_inputs",
    "copied",
    "copied_before_it_is_compiled",
    "averaged",
    "wrapped_to_be_made_again",
    "wrapped_as_a_whole",
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
