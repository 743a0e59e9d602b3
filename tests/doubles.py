"""Tests that the fast run leaves out, as others say the same of a smaller case or a cheaper form; ``--run-slow`` runs them.

Names of tests with the parameters in brackets, as pytest prints them; ``*`` stands for anything.
"""

DOUBLES = (
    # under gloo the same cases run in a few worlds
    *(
        f"test_states.py::test_as_the_unsharded_model*-{case}]"
        for case in (
            "a_cache_of_ones_own",
            "a_cache_whose_old_value_is_read",
            "a_cache_that_users_change",
            "a_cache_on_the_meta_device",
            "a_written_buffer_that_is_to_be_cut",
            "attention_kernels_and_matmul_precision",
            "autocast_around_the_call",
            "accumulation_with_no_sync",
            "draws_and_buffers_are_those_of_the_forward",
            "flex_attention_as_it_is_and_compiled",
            "frozen_but_for_the_head_and_unfrozen",
            "frozen_from_the_beginning",
            "gradients_of_gradients",
            "integers_of_every_width",
            "modes_of_parts",
            "optimizers_of_torch",
            "outputs_read",
            "parts_of_fused_projections_stay_cut",
        )
    ),
    # smaller meshes say the same
    "test_redistribute_bruteforce.py::test_equals_exhaustive_search*(2, 3, 4)-*",
    "test_compile_models.py::test_transformers*-dp2tp2sp2]",
    "test_compile_models.py::test_transformers*-dp4]",
    "test_compile_models.py::test_uneven_sizes*-tp4]",
    "test_compile_models.py::test_uneven_sizes*t5-*",
    "test_plan_quality.py::*-8]",
    # one model of a kind
    "test_dynamic_shapes.py::test_one_program_serves_all_sizes*hf_llama]",
    "test_dynamic_shapes.py::test_one_program_serves_all_sizes*gpt]",
    "test_ring.py::test_trains_as_one_device*hf_gpt2-*",
    "test_codegen.py::test_the_file_compiles_and_is_formatted*moe]",
    "test_capture_sources.py::*[[]gpt2]",
    "test_cli.py::test_verify[[]hf:llama]",
    # the training script runs for the README, too
    "test_training_gloo.py::test_one_script_and_one_directory_for_python_and_torchrun",
    "test_zero_gloo.py::test_case[[]is_prefetched]",
    "test_combinations.py::test_together[[]ring-again]",
    "test_combinations.py::test_together[[]experts-again]",
    "test_combinations.py::test_together[[]stages-cast]",
)
