"""The comparison with other implementations: same requests for all, every departure of tokens found and judged."""

import pytest

from cpu_bench.comparisons import NEAR_TIE, compare_tokens, random_requests, run_in_turn

REFERENCE = [[1, 2, 3], [4, 5]]
MARGINS = [{"margin": [1.0, NEAR_TIE / 2, 1.0]}, {"margin": [1.0, 2.0]}]


def compare(*runs):
    return compare_tokens(REFERENCE, MARGINS, list(runs))


def test_equal_tokens_in_all_runs_are_equal():
    assert compare(REFERENCE, REFERENCE) == {"equal": 2, "departures": [], "mismatches": 0}


def test_a_departure_at_a_near_tie_is_listed_but_is_no_mismatch():
    found = compare([[1, 9, 9], [4, 5]])
    assert found == {
        "equal": 1, "departures": [{"request": 0, "position": 1, "margin": NEAR_TIE / 2}], "mismatches": 0,
    }  # fmt: skip


def test_a_departure_where_one_token_clearly_leads_is_a_mismatch():
    found = compare([[1, 2, 3], [4, 9]])
    assert found == {"equal": 1, "departures": [{"request": 1, "position": 1, "margin": 2.0}], "mismatches": 1}


def test_only_the_first_departure_counts():
    found = compare([[9, 9, 3], [4, 5]])
    assert found["departures"] == [{"request": 0, "position": 0, "margin": 1.0}] and found["mismatches"] == 1


@pytest.mark.parametrize("tokens", [[1, 2], [1, 2, 3, 4], [], [1, 9]])
def test_an_output_of_another_length_is_a_mismatch_wherever_it_departs(tokens):
    assert compare([tokens, [4, 5]])["mismatches"] == 1


def test_a_departure_in_any_run_is_found():
    assert compare(REFERENCE, [[1, 2, 3], [9, 5]])["mismatches"] == 1


def test_the_requests_are_the_same_for_the_same_seed_and_within_their_bounds():
    settings = {"num_requests": 100, "shortest": 3, "longest": 6, "vocab_size": 40}
    prompts, limits = random_requests(**settings, seed=5)
    assert (prompts, limits) == random_requests(**settings, seed=5)
    assert {len(prompt) for prompt in prompts} == set(limits) == {3, 4, 5, 6}
    assert all(0 <= token < 40 for prompt in prompts for token in prompt)


def test_methods_take_turns_in_every_round_after_two_uncounted_requests():
    calls = []

    def method(name):
        def run(prompts, limits):
            calls.append((name, len(prompts)))
            return {"seconds": 0.0, "tokens": limits}

        return run

    runs = run_in_turn({"a": method("a"), "b": method("b")}, [[1]] * 5, [1] * 5, rounds=2)
    assert calls == [("a", 2), ("b", 2), ("a", 5), ("b", 5), ("a", 5), ("b", 5)]
    assert [len(of_method) for of_method in runs.values()] == [2, 2]
