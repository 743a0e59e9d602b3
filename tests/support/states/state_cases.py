"""What users change between calls of a sharded module, each against the unsharded model: in one process and under gloo.

Every case takes a mesh of two ranks and raises where the two differ. Run by test_states.py and training_worker.py.
"""

from __future__ import annotations

import state_asked  # noqa: F401  each registers its cases
import state_attached  # noqa: F401
import state_cases_accumulation  # noqa: F401
import state_cases_home  # noqa: F401
import state_cases_inputs  # noqa: F401
import state_cases_outputs  # noqa: F401
import state_decided  # noqa: F401
import state_edits  # noqa: F401
import state_experts  # noqa: F401
import state_files  # noqa: F401
import state_flags  # noqa: F401
import state_functions  # noqa: F401
import state_generate  # noqa: F401
import state_inputs  # noqa: F401
import state_kept  # noqa: F401
import state_later  # noqa: F401
import state_missing  # noqa: F401
import state_outside  # noqa: F401
import state_serving  # noqa: F401
import state_tensors  # noqa: F401
import state_torch  # noqa: F401
import state_written  # noqa: F401
from state_harness import CASES

__all__ = ["CASES", "IN_ONE_PROCESS", "SLOW"]

IN_ONE_PROCESS = set(
    """
    a_buffer_that_is_returned a_buffer_written_before_the_backward a_cache_in_a_plain_attribute
    a_meta_model_with_computed_buffers a_sparse_buffer a_state_set_anew_in_the_forward a_state_that_grows
    a_train_of_the_models_own a_value_that_is_overwritten all_frozen_records_nothing
    an_autograd_function_of_ones_own an_autograd_function_that_draws_or_writes an_eval_model_has_gradients
    an_input_written_in_the_forward another_default_device_around_the_first_call
    another_default_dtype_inside autocast_in_evaluation
    autocast_on_whole_tensors_is_eagers_bit_for_bit checkpointed deterministic_algorithms draws_that_nobody_reads
    frozen_between_forward_and_backward grad_mode_that_a_forward_asks_for grouped_products_in_float32
    parameters_of_others_are_trained questions_about_torch_and_tensors questions_that_are_refused
    inference_mode_that_a_forward_asks_for gradients_that_a_forward_turns_on_itself inputs_of_another_dtype_or_device
    inputs_that_are_not_dense outputs_require_what_eagers_do the_default_dtype training_false_records_nothing
    gradients_turned_on_in_an_inference_mode_of_its_own
    transforms_are_refused two_threads_at_once what_a_call_leaves_for_the_next classes_of_tensors_and_numbers
    a_buffer_written_in_another_dtype
    a_dict_that_hooks_change a_dict_that_the_forward_changes a_dict_of_transformers_that_the_forward_changes
    an_eval_forward_then_train_then_backward anomalies_are_detected copied_before_it_is_compiled
    flex_attention_as_it_is_and_compiled functions_that_hold_modules modes_of_parts rules_of_ones_own
    what_is_built_otherwise_is_refused what_the_first_call_made
    a_cache_given_as_an_argument a_cache_on_the_meta_device a_cache_that_the_caller_keeps a_cache_that_users_change
    a_cache_whose_old_value_is_read a_static_cache_that_has_no_tensors_yet a_tensor_in_a_plain_attribute
    an_encoder_called_before_the_whole an_optimizer_made_before attention_kernels_and_matmul_precision
    autocast_around_the_call buffers_replaced_by_assignment compiled_by_torch converted_to_another_dtype functional_calls
    inference_mode_first integers_of_every_width looked_at states_before_it_is_compiled wrapped_forward
    attributes_that_a_forward_reads parameters_that_compute_otherwise_are_refused options_that_are_changed_after_compile
    a_penalty_on_weights parameters_that_are_added a_gradient_that_is_given_and_used_again copied_inside_no_sync
    copied_with_handles_of_hooks wrapped_to_be_made_again wrapped_as_a_whole a_loss_outside_of_the_model outputs_read
    hooks_on_outputs_that_others_are_computed_from a_buffer_that_decides_and_is_set a_count_that_decides
    a_number_read_from_a_buffer_that_counts a_state_written_before_a_buffer_decides windows_beside_padding
    a_buffer_that_is_read_before_it_is_written frozen_but_for_the_head_and_unfrozen frozen_from_the_beginning
    a_parameter_written_before_the_backward a_checkpointed_output_in_parts what_a_call_collects traced_by_others
    tensors_of_others_are_written a_cache_of_ones_own a_written_buffer_that_is_to_be_cut a_cache_handed_in_and_out
    models_that_share_parameters hooks_that_were_there_are_removed noise_by_a_hook hooks_that_observe_are_refused
    hooks_of_the_whole_and_of_tensors hooks_of_parameters_without_a_gradient
    a_call_that_fails cached_parametrizations globals_that_are_parts outputs_that_share_memory
""".split()
)
"""what the fast run tries in one process: what torch and the model do, which is looked at before ranks matter; the others
it tries under gloo"""

SLOW = set(
    """
    a_buffer_that_is_read_before_it_is_written a_buffer_written_in_another_dtype a_cache_handed_in_and_out
    a_cache_of_ones_own a_cache_on_the_meta_device a_cache_that_the_caller_keeps a_cache_that_users_change
    a_cache_whose_old_value_is_read a_dict_of_transformers_that_the_forward_changes a_dict_that_hooks_change
    a_flag_that_is_set_later a_number_read_from_a_buffer_that_counts a_prompt_of_one_request_along_its_sequence
    a_state_written_before_a_buffer_decides a_static_cache_that_has_no_tensors_yet a_tensor_in_a_plain_attribute
    a_written_buffer_that_is_to_be_cut an_autograd_function_of_ones_own an_encoder_called_before_the_whole
    another_default_device_around_the_first_call attributes_after_conversions_and_copies autocast_in_evaluation
    autocast_on_whole_tensors_is_eagers_bit_for_bit averaged compiled_by_torch constrained
    converted_to_another_dtype copied_inside_no_sync copied_with_handles_of_hooks
    draws_and_buffers_are_those_of_the_forward each_rank_sums_its_own_experts flex_attention_as_it_is_and_compiled
    frozen_but_for_the_head_and_unfrozen fused_steps_on_gradients_that_lie_otherwise gradients_from_several_sides
    gradients_of_gradients gradients_that_a_forward_turns_on_itself
    gradients_turned_on_in_an_inference_mode_of_its_own hooks_that_were_there_are_removed
    hybrid_sharding_with_no_sync inference_mode_first inference_mode_that_a_forward_asks_for initialised_again
    integers_of_every_width label_smoothing_of_transformers losses_outside_with_penalties
    models_that_share_parameters modes_of_parts no_sync_after_a_summed_gradient noise_by_a_hook one_input_is_local
    optimizer_states_of_one_device outputs_fed_back outputs_written_to parts_differ_along_an_axis_that_does_not_cut
    parts_of_fused_projections_stay_cut parts_of_outputs_of_which_not_all_are_used pickled plans_for_local_inputs
    replicated_tensors_are_written_whole rows_travel_to_their_experts rules_of_ones_own
    saved_by_a_method_of_the_models statistics_computed_anew tables_under_a_scaler the_data_of_a_parameter_set
    tied_and_untied_after_compile weights_and_gradients_set_by_index weights_tied_in_other_layouts
    what_a_call_leaves_for_the_next wrapped_to_be_made_again
    a_step_after_no_sync copied dtensors_of_ones_own experts_in_modules_lie_whole_on_one_rank
    gradients_of_functions_of_outputs loaded_from_files local_inputs_that_do_not_fit optimizers_of_torch
    the_configuration_of_transformers_set_later matrices_dealt_to_ranks optimizer_states_on_the_host activations_on_the_host
    parameters_replaced_by_assignment text_generated_by_transformers
    weights_cut_in_every_part_are_clipped_saved_and_loaded
""".split()
)
"""what only ``--run-slow`` tries: others that are left do the same with another value, tensor, hook or mode"""
