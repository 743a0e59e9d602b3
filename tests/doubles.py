"""Tests that the fast run leaves out, as others say the same of a smaller case or a cheaper form; ``--run-slow`` runs them.

Names of tests with the parameters in brackets, as pytest prints them; ``*`` stands for anything.
"""

from state_cases import CASES

IN_ONE_PROCESS = """
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
""".split()
"""states that the fast run tries in one process: what torch and the model do, which is looked at before ranks matter"""

AGAIN = """
    a_cache_that_users_change a_cache_whose_old_value_is_read a_static_cache_that_has_no_tensors_yet autocast_in_evaluation
    flex_attention_as_it_is_and_compiled a_cache_that_the_caller_keeps integers_of_every_width
    a_cache_handed_in_and_out autocast_on_whole_tensors_is_eagers_bit_for_bit
""".split()
"""states that only ``--run-slow`` tries: caches and casts like those of the states that are left"""

DOUBLES = (
    # every state in one of the two worlds
    *(f"test_states_gloo.py::test_as_the_unsharded_model[[]{case}]" for case in IN_ONE_PROCESS),
    *(f"test_states.py::test_as_the_unsharded_model*-{case}]" for case in CASES if case not in IN_ONE_PROCESS),
    # smaller meshes say the same
    "test_redistribute_bruteforce.py::test_equals_exhaustive_search*(2, 3, 4)-*",
    "test_compile_models.py::test_transformers*-dp2tp2sp2]",
    "test_compile_models.py::test_transformers*-dp4]",
    "test_compile_models.py::test_transformers*-tp[12]]",
    "test_compile_models.py::test_uneven_sizes*-tp4]",
    "test_compile_models.py::test_uneven_sizes*t5-*",
    "test_plan_quality.py::*-8]",
    "test_plan_quality.py::test_tensor_parallel_is_no_dearer_than_megatron[[]2k-*",
    "test_every_rule.py::test_pairs_of_strategies[[]aten.conv*1d.default]",
    "test_zero.py::test_what_is_kept_is_the_best_of_all_mixtures[[]4]",
    # one of a kind
    "test_stage_plans.py::test_within_a_budget_the_first_stages_make_more_again",
    "test_logs.py::test_what_loggers_are_set_to_is_heard",
    "test_expert_rows.py::test_a_ring_over_several_sequences_gathers_no_rows*",
    "test_training_gloo.py::test_training[[]4-train_gpt]",
    "test_failures_gloo.py::test_a_rank_that_raises_before_it_meets_the_others*",
    "test_failures_gloo.py::test_a_rank_that_is_gone[[]stop]",
    "test_steering.py::test_other_integers_get_a_program_of_their_own[[]counted]",
    "test_steering.py::test_other_integers_get_a_program_of_their_own[[]segments]",
    "test_steering.py::test_other_integers_get_a_program_of_their_own[[]masked]",
    "test_compile_cases.py::test_parameters_keep_their_layout_in_the_other_mode[[]h100-pinned-*",
    "test_compile_cases.py::test_parameters_keep_their_layout_in_the_other_mode[[]ideal_network-free-*",
    "test_logs.py::test_a_program_that_logs_at_info_hears_nothing",
    "test_dynamic_shapes.py::test_a_saved_program_takes_inputs_of_any_length",
    "test_islands.py::test_kinds_of_islands_agree_to_the_last_bit[[]Columns]",
    "test_dynamic_shapes.py::test_one_program_serves_all_sizes*hf_llama]",
    "test_dynamic_shapes.py::test_one_program_serves_all_sizes*gpt]",
    "test_dynamic_shapes.py::test_one_program_serves_all_sizes[[]llama]",
    "test_ring.py::test_trains_as_one_device*hf_gpt2-*",
    "test_codegen.py::test_the_file_compiles_and_is_formatted*moe]",
    "test_capture_sources.py::*[[]gpt2]",
    "test_cli.py::test_verify[[]hf:llama]",
    # the training script runs for the README, too
    "test_training_gloo.py::test_one_script_and_one_directory_for_python_and_torchrun",
    "test_combinations.py::test_together[[]ring-again]",
    "test_combinations.py::test_together[[]experts-again]",
    "test_combinations.py::test_together[[]stages-cast]",
    *(f"test_states.py::test_as_the_unsharded_model*-{case}]" for case in AGAIN),
    # of several that take seconds each, the ones that differ least from what is left
    "test_objective.py::test_the_total_is_the_least_of_all_choices[[]1048576-True]",
    "test_objective.py::test_the_total_is_the_least_of_all_choices[[]65536-False]",
    "test_experts.py::test_what_is_no_mixture_stays[[]fewer_ids_modules]",
    "test_experts.py::test_what_is_no_mixture_stays[[]more_weights_modules]",
    "test_experts.py::test_what_is_no_mixture_stays[[]crowded_modules]",
    "test_expert_rows.py::test_what_works_row_by_row_keeps_the_dims_of_rows[[]True]",
    "test_shares.py::test_no_expert_has_a_faster_program[[]256-64-*",
    "test_shares.py::test_no_expert_has_a_faster_program[[]256-4096-cpu]",
    "test_shares.py::test_no_expert_has_a_faster_program[[]256-4096-late]",
    "test_serving.py::test_what_a_step_sends[[]gpt2]",
    "test_feasible.py::test_a_mesh_of_two_axes_is_no_dearer_than_one_of_as_many_ranks[[]0.4]",
    "test_runtime.py::test_values_and_gradients*{'a': 2, 'b': 2}]",
    "test_alike.py::test_what_is_prepared_once_serves_all_limits[[]False]",
    "test_zero.py::test_micro_batches_in_flight_share_what_is_gathered[[]zero2]",
    "test_redistribute_bruteforce.py::test_equals_exhaustive_search[[](2, 2, 2)-rank3-*",
    "test_stage_prices.py::test_more_micro_batches_take_as_long_each[[]zero1]",
    "test_stage_prices.py::test_more_micro_batches_take_as_long_each[[]ddp]",
    "test_rows.py::test_k_of_32_layers_change_their_state[[]0.93]",
    "test_rows.py::test_rows_equal_brute_force[[]100]",
    "test_mistraced.py::test_dropout_between_recurrent_layers[[]lstm with a projection-*",
    "test_mistraced.py::test_dropout_between_recurrent_layers[[]gru without biases-*",
    "test_loops.py::test_training_equals_eager[[]Tensors-*",
    "test_loops.py::test_training_equals_eager[[]Names-*",
    "test_fuzz_calls.py::test_random_calls[[][1-5]]",
    "test_plan_quality.py::test_every_layer_communicates_alike[[][14]k]",
    "test_profile.py::test_other_models[[]vit]",
    "test_steering.py::test_the_integers_of_the_example_decide[[]masked-axes[12]]",
    "test_dynamic_shapes.py::test_one_program_serves_all_sizes[[]hf_bert]",
    # in one process others say the same
    "test_precision_gloo.py::*",
    "test_again_gloo.py::*",
    "test_microbatches_gloo.py::*",
    "test_groups_gloo.py::test_shared[[]4 ranks-*",
    "test_runtime_gloo.py::test_gloo[[]4 ranks-*",
    "test_training_gloo.py::test_training[[]4-train_llama]",
    "test_pipeline_gloo.py::*read_in_fewer_stages*",
    # of several that take seconds each, once more
    "test_least.py::test_above_the_least_all_budgets_are_met_and_plans_get_quicker",
    "test_feasible.py::test_what_fits_block_by_block_is_found_where_the_search_may_choose",
    "test_loops.py::test_training_equals_eager[[]Listed-dp2tp2]",
    "test_loops.py::test_training_equals_eager[[]Numbers-dp2tp2]",
    "test_loops.py::test_one_program_serves_batches_that_hit_other_experts[[]Names]",
    "test_loops.py::test_one_program_serves_batches_that_hit_other_experts[[]Tensors]",
    "test_recompute.py::test_what_the_head_keeps_does_not_count_while_attention_works",
    "test_hints_beside_like.py::test_a_hint_on_one_of_several_experts_is_refused_by_name[[]rowwise]",
    "test_hints_beside_like.py::test_a_hint_on_one_of_several_experts_is_refused_by_name[[]{'ep': Replicate()}]",
    "test_search_over_time.py::test_messages_and_windows_come_near_the_best_of_a_large_network",
    "test_like_notes.py::test_too_few_positions_or_heads[[]*-lengths[123589]*-told*",
    "test_like.py::test_the_free_plan_is_never_above_an_expert[[]dlrm]",
    "test_like.py::test_megatron_cuts_the_heads_of_attention_beside_experts[[]GptOss]",
    "test_folded_order.py::test_where_it_is_not_carried",
    "test_tables_together.py::test_plans_within_memory_that_do_the_same_along_all_axes[[]0.99]",
    "test_tables_together.py::test_what_a_table_costs_elsewhere_is_the_difference_of_totals*True]",
    "test_cli.py::test_verify[[]hf:mixtral]",
    "test_cli.py::test_show_a_program_for_all_lengths",
    "test_memory.py::test_the_peak_is_the_tracked_one[[]llama-none]",
    "test_memory.py::test_the_peak_is_the_tracked_one[[]gpt-none]",
    "test_memory.py::test_the_peak_is_the_tracked_one[[]gpt-blocks]",
    "test_memory.py::test_kept_bytes_are_those_that_autograd_keeps*-selective]",
    "test_stage_prices.py::test_where_memory_is_short_a_search_is_no_worse_than_an_expert",
    "test_within_budget.py::test_no_expert_is_cheaper_within_the_budget[[][28]]",
    "test_within_budget.py::test_no_plan_that_fits_is_below_the_bound[[][28]-*",
    "test_every_rule.py::test_pairs_of_strategies[[]autoshard.experts.default]",
    "test_experts.py::test_routing_as_users_write_it[[]masked_modules]",
    "test_experts.py::test_routing_as_users_write_it[[]half_turned]",
    "test_experts.py::test_what_is_no_mixture_stays[[]wider_modules]",
    "test_experts.py::test_what_is_no_mixture_stays[[]masked_otherwise_modules]",
    "test_stages_per_rank.py::test_as_many_as_make_the_step_shortest[[]1000000000000000.0-4]",
    "test_contest.py::test_a_row_of_copies_is_solved_nearly_as_well_as_one",
    "test_masks.py::test_models_of_transformers[[]mistral-{'cp': 2, 'tp': 2}]",
)
