"""The tiers of tests: `make test-fast` and `make test` leave out what is named here; with --slow everything runs.

A test that is marked slow, or named in SLOW, runs with --slow only. SLOW says where the default tier tests the same
behaviour; what is marked slow is a longer variant of what is beside it in its file.
"""

from __future__ import annotations

from collections.abc import Iterable

CONTRACT = "tests/test_contract.py, in every way to decode"

# File or folder below tests/ -> beginnings of names of tests, with where the default tier tests the same.
SLOW: dict[str, dict[str, str]] = {
    "diffusion/test_embedded.py": {
        "test_answers_are_the_same_in_company[sampled]": CONTRACT,
        "test_answers_are_the_same_in_company[greedy]": CONTRACT,
    },
    "engine/test_bound_draws.py": {
        "test_bound_requests_beside_each_other_get_their_tokens_in_every_way[ngram]": CONTRACT,
        "test_branches_are_bound_each_for_itself[batching-draft model]": "[batching-ngram]",
        "test_a_stale_token_before_the_latest_shows_as_rejections": "the other planted bugs",
        "test_bound_requests_beside_each_other_get_their_tokens_in_every_way[trees]": CONTRACT,
        "test_bound_requests_beside_each_other_get_their_tokens_in_every_way[chains]": CONTRACT,
        "test_bound_requests_beside_each_other_get_their_tokens_in_every_way[draft": CONTRACT,
        "test_branches_are_bound_each_for_itself[in_one_sequence-draft model]": "[ngram]",
        "test_preempted_requests_count_each_of_their_tokens_once[chains]": "[loops]",
        "test_after_a_recovery_bounds_are_as_they_were[trees]": "[loops]",
        "test_drafts_are_drawn_within_bounds[trees]": "[draft model]",
        "test_a_prompt_that_is_cached_whole_is_no_chunk[draft model]": "[loops]",
    },
    "engine/test_beside.py": {
        "test_requests_that_arrive_while_others_run_get_their_tokens[draft model]": "[loops]",
        "test_requests_that_arrive_while_others_run_get_their_tokens[trees]": "[loops]",
        "test_branches_go_on_beside_chunks[in_one_sequence-draft model]": "[loops]",
    },
    "engine/test_constraints.py": {
        "test_constrained_requests_get_the_tokens_of_the_oracle[trees]": "[draft model]",
        "test_masks_that_come_and_go_change_no_token[trees]": "[loops]",
        "test_a_planted_bug_is_noticed[a mask that stays]": "the other planted bugs",
        "test_constrained_requests_get_the_tokens_of_the_oracle[ngram]": "[draft model]",
        "test_constrained_requests_get_the_tokens_of_the_oracle[chains]": "[draft model]",
        "test_tokens_are_those_of_the_oracle_whenever_draws_have_masks[trees": "[loops",
        "test_branches_have_constraints_of_their_own[loops-batching]": "[loops-in_one_sequence]",
    },
    "engine/test_core_greedy.py": {
        "test_requests_in_one_batch_get_the_oracles_tokens[LlamaForCausalLM]": "[Qwen3ForCausalLM]",
        "test_prompts_cut_into_chunks_get_the_oracles_tokens[Qwen3ForCausalLM-33]": "[Qwen3ForCausalLM-16]",
        "test_requests_in_one_batch_get_the_oracles_tokens[Qwen2ForCausalLM]": "[Qwen3ForCausalLM]",
        "test_requests_alone_get_the_oracles_tokens[LlamaForCausalLM]":
            "[Qwen3ForCausalLM]; logits in tests/models/test_hf_parity.py",
        "test_requests_alone_get_the_oracles_tokens[Qwen2ForCausalLM]":
            "[Qwen3ForCausalLM]; logits in tests/models/test_hf_parity.py",
        "test_prompts_cut_into_chunks_get_the_oracles_tokens[LlamaForCausalLM-16]": "[Qwen3ForCausalLM-16]",
        "test_prompts_cut_into_chunks_get_the_oracles_tokens[Qwen2ForCausalLM-16]": "[Qwen3ForCausalLM-16]",
        "test_launching_ahead_and_decode_loops_do_not_change_the_tokens[limits2]": "[limits1]",
    },
    "engine/test_experts.py": {
        "test_requests_get_the_oracles_tokens_alone_together_and_from_the_cache[Bailing":
            "[Qwen3MoeForCausalLM]; tests/models/test_mixture_numpy.py",
        "test_requests_that_speculate_get_the_same_tokens": CONTRACT,
        "test_blocks_of_a_model_with_experts_get_the_tokens_of_the_loop": "tests/models/test_sparse_llm.py",
    },
    "engine/test_no_recompiles.py": {
        "test_a_thousand_random_requests_compile_nothing_and_leak_no_page": CONTRACT,
    },
    "engine/test_prefix_caching.py": {
        "test_prompts_beyond_a_dynamic_rotary_limit_share_with_equal_lengths_only": "tests/cache",
    },
    "engine/test_strategies.py": {
        "test_a_sequence_that_ends_within_a_round_lands_no_more[verification]": "[block]",
        "test_requests_get_the_tokens_of_plain_decoding[verification]": "[block]",
    },
    "engine/test_rows_without_score.py": {
        "test_a_drafter_that_is_nan_changes_no_token[trees": "[a draft model-greedy]",
        "test_in_whole_sequences_and_windows[dual]": "the other caches",
        "test_in_rounds_of_speculation[trees": "[n-grams]",
        "test_in_rounds_of_speculation[a draft model": "[n-grams]",
        "test_a_drafter_that_is_nan_changes_no_token[a draft model-top-k]": "[greedy]",
    },
    "speculative/test_engine.py": {
        "test_requests_get_the_tokens_of_plain_decoding[ngram-AnyGamma]": "[itself-AnyGamma]",
        "test_more_rows_than_can_verify_as_many_drafts_get_fewer": "tests/speculative/test_shapes.py",
        "test_requests_get_the_tokens_of_plain_decoding[eagle3": CONTRACT,
        "test_settings_of_the_engine_do_not_change_tokens": CONTRACT,
        "test_a_request_alone_gets_the_tokens_of_plain_decoding[eagle3]": CONTRACT,
    },
    "speculative/test_no_recompiles.py": {
        "": CONTRACT,
    },
    "speculative/test_llm.py": {
        "test_the_embedded_draft_model_drafts_for_the_embedded_target": CONTRACT,
        "test_the_embedded_head_drafts_trees_for_the_embedded_target": CONTRACT,
    },
    "speculative/test_eagle3_trees.py": {
        "test_behind_a_cached_prefix_the_head_goes_on": CONTRACT,
        "test_trees_are_those_of_numpy[0.8]": "[0.0]",
        "test_branches_get_the_trees_of_each_alone": "tests/branching/test_speculating_branches.py",
        "test_prompts_in_chunks_leave_no_gap": CONTRACT,
        "test_a_preempted_request_gets_the_same_trees": CONTRACT,
    },
    "speculative/test_drafter.py": {
        "test_a_planted_bug_is_found_out[verification reads and writes one place too far]": "the others",
        "test_a_planted_bug_is_found_out[verification samples": "the others",
        "test_a_planted_bug_is_found_out[stale KV after full acceptance]": "the others",
        "test_a_planted_bug_is_found_out[a draft too many is accepted]": "the others",
    },
    "branching/test_speculating_branches.py": {
        "test_nothing_of_the_target_itself_is_rejected[FixedGamma-in_one_sequence]": "[FixedGamma-batching]",
        "test_branches_get_the_tokens_of_plain_decoding[ngram-FixedGamma":
            "test_nothing_of_the_target_itself_is_rejected",
        "test_branches_get_the_tokens_of_plain_decoding[itself-FixedGamma": "[ngram]",
        "test_branches_get_the_tokens_of_plain_decoding[itself-AnyGamma": "[ngram]",
        "test_branches_get_the_tokens_of_plain_decoding[ngram-AnyGamma": "[FixedGamma]",
        "test_groups_of_both_modes_and_others_share_rounds": CONTRACT,
        "test_nothing_of_the_target_itself_is_rejected[AnyGamma": "[FixedGamma]",
    },
    "branching/test_engine_branches.py": {
        "test_groups_and_other_requests_share_launches_in_a_small_pool": CONTRACT,
    },
    "branching/test_beam_search.py": {
        "test_too_few_pages_or_seats_change_no_beam[limits0]":
            "test_beams_that_do_not_fit_into_the_pool_together_take_turns",
        "test_beams_that_do_not_fit_into_the_pool_together_take_turns[2-4]": "the others",
        "test_beams_that_do_not_fit_into_the_pool_together_take_turns[1-8]": "the others",
        "test_too_few_pages_or_seats_change_no_beam[limits1]":
            "test_beams_that_do_not_fit_into_the_pool_together_take_turns",
    },
    "branching/test_random_groups.py": {
        "test_random_groups_give_the_tokens_of_each_sequence_alone[cached, crowded]": "[cached]",
        "test_random_groups_give_the_tokens_of_each_sequence_alone[not cached, crowded]": "[cached]",
    },
    "diffusion/test_engine.py": {
        "test_tokens_do_not_depend_on_order_and_neighbours": CONTRACT,
        "test_settings_of_the_engine_do_not_change_tokens": CONTRACT,
        "test_credits_of_rounds_before_count": "tests/diffusion/test_bidirectional.py",
    },
    "diffusion/test_engine_planted_bugs.py": {
        "test_a_page_is_cached_with_the_final_keys_and_values_of_its_last_block": CONTRACT,
        "test_an_end_counts_once_everything_before_it_is_known": "the others",
        "test_planted_bugs_are_found[counter_is_kept]": "the others",
        "test_planted_bugs_are_found[commit_round_is_left_out]": "the others",
    },
    "diffusion/test_bidirectional.py": {
        "test_tokens_do_not_depend_on_neighbours_and_order": CONTRACT,
        "test_every_round_commits_what_the_loop_commits[prefix-smoothed]": "[vicinity-smoothed]",
        "test_every_round_commits_what_the_loop_commits[none-smoothed]": "[vicinity-smoothed]",
        "test_rules[factor-smoothed]": "[hierarchy-smoothed]",
        "test_rules[credit-smoothed]": "[hierarchy-smoothed]",
    },
    "diffusion/test_bidirectional_llm.py": {
        "test_streams_bring_blocks[LLaDAMoEModelLM]": "[LLaDAModelLM]",
        "test_branches_are_answered_as_if_alone[LLaDAMoEModelLM]": "[LLaDAModelLM]",
        "test_samples_of_a_prompt_are_those_of_their_seeds[LLaDAMoEModelLM]": "[LLaDAModelLM]",
        "test_prompts_are_answered_as_by_the_loop[LLaDAMoEModelLM]": "[LLaDAModelLM]",
    },
    "diffusion/test_bidirectional_planted_bugs.py": {
        "test_masks_are_never_drawn": "the others",
        "test_planted_bugs_are_found[constant_weight]": "the others",
        "test_planted_bugs_are_found[windows_see": "the others",
    },
    "diffusion/test_llm.py": {
        "test_nothing_compiles_after_warm_up": CONTRACT,
    },
    "textbook/diffusion/test_worker.py": {
        "test_tokens_are_those_of_the_engine[dual]": "tokens and counters of the loop",
        "test_tokens_are_those_of_the_engine[vicinity smoothed]": "tokens and counters of the loop",
        "test_experts": "tests/models/test_llada.py",
        "test_tokens_and_counters_are_those_of_the_loop[dual smoothed]": "[vicinity smoothed]",
        "test_tokens_and_counters_are_those_of_the_loop[vicinity]": "[vicinity smoothed]",
        "test_tokens_and_counters_are_those_of_the_loop[prefix smoothed]": "[vicinity smoothed]",
        "test_tokens_and_counters_are_those_of_the_loop[no cache, credit]": "[vicinity smoothed]",
    },
    "textbook/diffusion/test_block_causal.py": {
        "test_every_iteration_is_that_of_the_loop[SDARForCausalLM]": "[LLaDA2MoeModelLM]",
        "test_tokens_and_counters_are_those_of_the_loop": "test_every_iteration_is_that_of_the_loop[LLaDA2MoeModelLM]",
    },
    "textbook/diffusion/test_placement.py": {
        "test_devices_that_share_a_model_denoise_as_the_loop_does[LLaDA2MoeModelLM]":
            "tests/textbook/diffusion/test_block_causal.py, on one device",
        "test_arrays_are_on_the_device_that_is_named": "tests/textbook/test_devices.py",
        "test_devices_that_share_a_model_denoise_as_the_loop_does[LLaDAModelLM]":
            "tests/textbook/diffusion/test_worker.py, on one device",
        "test_devices_that_share_a_model_denoise_as_the_loop_does[LLaDAMoEModelLM]":
            "tests/textbook/diffusion/test_worker.py, on one device",
    },
    "faults/test_faults.py": {
        "test_no_line_that_raises_changes_a_token[draft_model]":
            "[plain] and [block]; tests/faults/test_fake_engine.py",
        "test_no_line_that_raises_changes_a_token[eagle3]": "[plain]",
        "test_no_line_that_raises_changes_a_token[ngram]": "[plain]",
        "test_no_line_that_raises_changes_a_token[bidirectional]": "[block]",
    },
    "faults/test_fake_engine.py": {
        "test_every_line_may_raise_at_every_moment[steps]": "[loops]",
    },
    "test_tensor_parallel.py": {
        "test_draws_are_bound_on_eight_devices_as_on_one": "tests/engine/test_bound_draws.py, on one device",
        "test_two_processes_of_one_device_each": "four devices of one process",
        "test_four_devices_that_speculate_give_the_same_tokens": "drafts on one device; plain on four",
        "test_four_devices_that_share_every_expert": "dense layers on four",
        "test_four_devices_denoise_whole_sequences": "plain on four",
    },
    "models/test_sparse_llm.py": {
        "test_an_autoregressive_mixture_gives_the_recorded_tokens": "tests/models/test_mixture_numpy.py",
    },
    "test_llm_hf_parity.py": {
        "test_greedy_tokens_match[qwen3_dynamic-64_0]": "logits in tests/models/test_hf_parity.py",
        "test_greedy_tokens_match[llama3_tied-256_0]": "logits in tests/models/test_hf_parity.py",
        "test_greedy_tokens_match[qwen2_linear_sharded-256_0]": "logits in tests/models/test_hf_parity.py",
    },
    "planning/test_programs.py": {
        "test_all_programs_are_compiled_from_shapes": "tests/aot",
    },
    "programs/test_mapped_memory.py": {
        "test_the_maps_of_a_program_are_no_more_than_was_said": "the other tests of its file",
    },
    "scripts/gpu_bench": {
        "": "used on a GPU only",
    },
    "scripts/test_run_diffusion_worker.py": {
        "test_a_file_goes_through_a_random_model": "the other tests of its file",
    },
    "scripts/training/test_denoising.py": {
        "": "trainings are run by hand",
    },
    "scripts/training/test_unrolled.py": {
        "": "trainings are run by hand",
    },
    "scripts/training/test_heads.py": {
        "": "trainings are run by hand",
    },
    "scripts/training/test_distillation.py": {
        "": "trainings are run by hand",
    },
    "scripts/training/test_loop.py": {
        "": "trainings are run by hand",
    },
    "test_extreme_params.py": {
        "test_what_is_accepted_generates_tokens_of_the_vocabulary": "tests/sampling",
    },
    "kernels/test_branch_attention_merging.py": {
        "": "tests/kernels/test_branch_attention_interpreted.py",
    },
    "planning/test_command.py": {
        "test_compiled_figures_complete_table_and_json": "tests/aot",
    },
    "kernels/test_branch_attention_blocks.py": {
        "test_a_plan_lists_for_every_block": "tests/kernels/test_branch_attention_interpreted.py",
    },
    "aot/test_whole_steps.py": {
        "test_rounds_and_what_feeds_a_drafter_leave_both_caches_in_place_and_never_wait[draft_model-prefill]":
            "[draft_model-drafter_catch_up]",
        "test_rounds_and_what_feeds_a_drafter_leave_both_caches_in_place_and_never_wait[ngram-speculative_rounds]":
            "[draft_model-speculative_rounds]",
        "test_rounds_of_trees_leave_both_caches_in_place_and_never_wait[branch_tree_rounds-5]": "[tree_rounds-8]",
        "test_a_single_row_and_the_other_gpus_are_served_in_place_too[h100]": "[b200]",
        "test_counts_of_tokens_are_updated_where_they_lie[prefill]": "[decode_loop]",
        "test_several_gpus_run_the_kernels_on_heads_of_their_own_and_send_no_weights[decode_loop-16]":
            "[decode_loop-4]",
        "test_rounds_of_trees_leave_both_caches_in_place_and_never_wait[tree_rounds-1]": "[tree_rounds-8]",
        "test_rounds_of_trees_leave_both_caches_in_place_and_never_wait[prefill-8]": "[drafter_catch_up-8]",
    },
    "aot/test_experts.py": {
        "test_steps_with_experts_leave_the_cache_in_place_and_never_wait[llada2_moe-1-denoise_loop]":
            "[llada2_moe-32-prefill]",
        "test_steps_with_experts_leave_the_cache_in_place_and_never_wait[llada2_moe-32-denoise_loop]":
            "[llada2_moe-32-prefill]",
        "test_steps_with_experts_leave_the_cache_in_place_and_never_wait[qwen3_moe-1-decode_loop]":
            "[qwen3_moe-64-decode_loop]",
        "test_steps_with_experts_leave_the_cache_in_place_and_never_wait[qwen3_moe-64-prefill]":
            "[llada2_moe-32-prefill]",
    },
    "aot/test_windowed_steps.py": {
        "test_windows_leave_the_pool_in_place[gemma-3-27b-it-prefill]": "[gpt-oss-20b-prefill]",
        "test_windows_leave_the_pool_in_place[gemma-3-27b-it-branch_loop]": "[gpt-oss-20b-branch_loop]",
    },
    "aot/test_branch_attention.py": {
        "test_a_case_of_the_table_compiles_in_the_form_that_is_served[a_random_step_3]": "the first three",
        "test_a_case_of_the_table_compiles_in_the_form_that_is_served[a_random_step_4]": "the first three",
        "test_a_case_of_the_table_compiles_in_the_form_that_is_served[a_random_step_5]": "the first three",
        "test_a_case_of_the_table_compiles_in_the_form_that_is_served[a_random_step_6]": "the first three",
        "test_a_case_of_the_table_compiles_in_the_form_that_is_served[a_random_step_7]": "the first three",
        "test_a_case_of_the_table_compiles_in_the_form_that_is_served[a_random_step_8]": "the first three",
        "test_a_case_of_the_table_compiles_in_the_form_that_is_served[a_random_step_9]": "the first three",
    },
    "aot/test_bidirectional.py": {
        "test_refreshes_and_windows_leave_the_cache_in_place_and_wait_only_for_experts_of_whole_sequences[prefill-plain]":
            "[prefill-smoothed]",
        "test_refreshes_and_windows_leave_the_cache_in_place_and_wait_only_for_experts_of_whole_sequences[denoise_loop-plain]":
            "[denoise_loop-smoothed]",
    },
    "test_tensor_parallel_families.py": {
        "test_four_devices_give_the_tokens_of_one[gemma4]": "[gpt_oss]",
    },
    "frontend/test_jobs.py": {
        "test_jobs_beside_each_other_answer_as_alone": "tests/async_llm/test_serving.py",
    },
    "engine/test_masked_launches.py": {
        "test_rows_that_need_the_host_after_each_token_are_launched_together[trees]": "[loops]",
    },
    "diffusion/test_constrained_llm.py": {
        "test_answers_are_the_same_again_and_in_company": CONTRACT,
    },
    "textbook/branching/test_decode_engine.py": {
        "test_all_three_modes_have_the_oracles_tokens_where_branches_end_apart_and_join_late":
            "tests/textbook/branching/test_decode.py",
    },
    "engine/test_token_sources.py": {
        "test_second_draws_and_forced_tokens_are_those_of_the_plain_loop[late]": "[in time]",
    },
}  # fmt: skip

# The fast tier: folders and files that compile no engine, and five smoke tests.
FAST = (
    "tests/cache",
    "tests/checkpoint",
    "tests/cli",
    "tests/constraints",
    "tests/docs",
    "tests/frontend",
    "tests/memory",
    "tests/sampling",
    "tests/scheduling",
    "tests/models/test_config",
    "tests/models/test_families.py",
    "tests/models/test_family_ropes.py",
    "tests/models/test_layer_fields.py",
    "tests/models/test_windows.py",
    "tests/models/test_wrappers.py",
    "tests/programs/test_buckets.py",
    "tests/programs/test_stand_ins.py::test_a_larger",
    "tests/branching/test_bim.py",
    "tests/branching/test_branch_state.py",
    "tests/speculative/test_cost_controller.py",
    "tests/speculative/test_ngram.py",
    "tests/speculative/test_tree.py",
    "tests/test_config.py",
    "tests/test_messages.py",
    "tests/test_moved.py",
    "tests/test_outputs.py",
    "tests/test_public_names.py",
    "tests/test_repository.py",
    "tests/test_sampling_params.py",
    "tests/test_tokenizer.py",
    "tests/test_words.py",
    "tests/textbook/prefix_cache",
)
# What compiles engines in these folders.
COMPILING = ("tests/cache/test_page_log.py", "tests/cli/test_bench.py", "tests/frontend/test_jobs.py")
SMOKE = (
    "tests/engine/test_core_greedy.py::test_requests_alone_get_the_oracles_tokens[Qwen3ForCausalLM]",
    "tests/speculative/test_engine.py::test_a_request_alone_gets_the_tokens_of_plain_decoding[ngram]",
    "tests/diffusion/test_engine.py::test_a_request_alone_gets_the_tokens_of_the_loop",
    "tests/diffusion/test_bidirectional.py::test_every_round_commits_what_the_loop_commits[dual-plain]",
    "tests/test_llm.py::test_a_prompt_is_continued_in_whatever_form_it_comes[Say a]",
)


def is_slow(node_id: str) -> bool:
    return node_id.startswith(_SLOW)


def is_fast(node_id: str) -> bool:
    return node_id.startswith(FAST + SMOKE) and not node_id.startswith(COMPILING)


def stale(node_ids: Iterable[str]) -> list[str]:
    """Return the entries of the tables that name none of all tests."""
    ids = list(node_ids)
    entries = [
        entry for entry in (*_SLOW, *FAST, *COMPILING, *SMOKE) if not entry.startswith("tests/aot")
    ]  # run by themselves
    return [entry for entry in entries if not any(each.startswith(entry) for each in ids)]


_SLOW = tuple(f"tests/{place}::{test}" if test else f"tests/{place}" for place, tests in SLOW.items() for test in tests)
