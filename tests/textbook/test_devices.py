"""Devices by name, and arrays on them that no later change of the host's values reaches."""

import jax
import numpy as np
import pytest

from jaxinfer.textbook.devices import device_of, placed


@pytest.mark.parametrize("name", ["cpu", "cpu:0", "CPU"])
def test_a_name_is_a_device(name):
    assert device_of(name) is jax.devices("cpu")[0]


def test_a_device_is_itself():
    device = jax.devices()[0]
    assert device_of(device) is device


@pytest.mark.parametrize("name", ["warp", "cpu:99", "cpu:", "cpu:-1", "cpu:x", "", ":0", 1.5, object()])
def test_what_is_no_device_here_is_refused_with_a_list_of_what_there_is(name):
    with pytest.raises(ValueError, match="device must be one of cpu:0.* or a jax.Device"):
        device_of(name)


def test_placed_values_do_not_follow_their_owner():
    values = np.arange(64, dtype=np.int32)
    on_device = placed(values, jax.devices("cpu")[0])
    values[:] = -1
    assert on_device.tolist() == list(range(64))


def test_values_without_a_device_are_read_only_while_their_owner_may_write():
    values = np.zeros(2, np.int32)
    seen = placed(values, None)
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 1
    values[0] = 2
    assert seen.tolist() == [2, 0]
