"""Metrics of an engine: copies that do not change, and Prometheus' text."""

from dataclasses import fields

from jaxinfer.engine.metrics import EngineMetrics, Histogram


def test_a_copy_does_not_move_with_what_it_is_a_copy_of():
    metrics = EngineMetrics(num_launches_total=3, spec_decode_num_accepted_tokens_per_pos=[4, 1])
    metrics.time_to_first_token_seconds.observe(0.3)
    before = metrics.copy()
    assert before == metrics and before is not metrics
    metrics.num_launches_total += 1
    metrics.spec_decode_num_accepted_tokens_per_pos[0] += 5
    metrics.time_to_first_token_seconds.observe(0.3, 2)
    assert (before.num_launches_total, before.spec_decode_num_accepted_tokens_per_pos) == (3, [4, 1])
    assert (before.time_to_first_token_seconds.count, metrics.time_to_first_token_seconds.count) == (1, 3)
    for item in fields(EngineMetrics):
        if isinstance(own := getattr(before, item.name), Histogram | list):
            assert own is not getattr(metrics, item.name)


def test_failures_and_recoveries_are_counters_of_the_text():
    text = EngineMetrics(num_step_failures_total=2, num_recoveries_total=1).prometheus()
    for line in (
        "# TYPE jaxinfer:num_step_failures_total counter", "jaxinfer:num_step_failures_total 2",
        "# TYPE jaxinfer:num_recoveries_total counter", "jaxinfer:num_recoveries_total 1",
    ):  # fmt: skip
        assert line in text.splitlines()


def test_the_version_of_the_weights_is_a_label_whatever_it_says():
    text = EngineMetrics(weights_version='step "1"\n').prometheus()
    assert 'jaxinfer:weights_version{version="step \\"1\\"\\n"} 1\n' in text
