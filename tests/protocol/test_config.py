"""Values that Python gives to `EngineConfig`: what `checked` lets through, and what its errors say."""

import math
from pathlib import Path

import pytest

from repertory.protocol.config import FIELDS, EngineConfig, allowed, checked, description, pitfalls, shown
from repertory.protocol.errors import ConfigError


def test_the_defaults_are_valid_and_come_back_equal():
    config = EngineConfig(model="demo")
    assert checked(config) == config


def test_every_setting_has_a_description_and_a_type_in_words():
    assert all(description(key) and allowed(key) for key in FIELDS)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("block_size", 0, "an integer, at least 1 and at most 1024"),
        ("block_size", 1025, "an integer, at least 1 and at most 1024"),
        ("block_size", True, "an integer"),
        ("block_size", 16.5, "an integer"),
        ("max_num_seqs", True, "an integer, at least 1 or none"),
        ("max_num_seqs", 0, "at least 1"),
        ("max_num_seqs", 2**63, "an integer"),
        ("seed", 10**400, "an integer"),
        ("gpu_memory_utilization", 0, "a number, above 0 and at most 1"),
        ("gpu_memory_utilization", 1.01, "at most 1"),
        ("gpu_memory_utilization", math.nan, "a number"),
        ("gpu_memory_utilization", True, "a number"),
        ("kv_offloading_size", math.inf, "a number, at least 0"),
        ("max_pause_s", math.inf, "a number, above 0"),
        ("scheduling_delay_s", 10**400, "a number"),
        ("enable_prefix_caching", 1, "true or false"),
        ("enable_prefix_caching", "false", "true or false"),
        ("enable_prefix_caching", None, "true or false"),
        ("preemption_mode", "swop", "one of auto, heuristic, recompute, swap"),
        ("dtype", 16, "one of auto, bfloat16"),
        ("model", None, "text"),
        ("model", Path("weights"), "text"),
        ("max_steps_in_flight", 3, "at least 1 and at most 2"),
        ("port", 65536, "at most 65535"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_with_key_value_and_range(key, value, expected):
    with pytest.raises(ConfigError) as caught:
        checked(EngineConfig(**{"model": "demo", key: value}))
    assert caught.value.key == key
    message = str(caught.value)
    assert message.startswith(f"{key}: ")
    assert expected in message
    assert len(message) < 250


def test_an_integer_serves_as_a_float():
    config = checked(EngineConfig(model="demo", kv_offloading_size=2))
    assert config.kv_offloading_size == 2.0
    assert isinstance(config.kv_offloading_size, float)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:²", "cuda:-1", "cudax", "CPU", ""])
def test_a_device_of_another_name_is_refused(device):
    with pytest.raises(ConfigError, match="device") as caught:
        checked(EngineConfig(model="demo", device=device))
    assert caught.value.key == "device"


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:11", "simulated"])
def test_the_devices_that_the_documentation_names_are_accepted(device):
    assert checked(EngineConfig(model="demo", device=device)).device == device


def test_a_speculative_window_of_more_than_half_the_chunk_is_refused_with_both_numbers():
    assert checked(EngineConfig(model="demo", max_num_batched_tokens=64, speculative_window=32)).speculative_window == 32
    with pytest.raises(ConfigError, match=r"33.*64") as caught:
        checked(EngineConfig(model="demo", max_num_batched_tokens=64, speculative_window=33))
    assert caught.value.key == "speculative_window"


def test_a_small_chunk_is_a_pitfall_on_a_gpu_only():
    assert "512" in pitfalls(EngineConfig(model="m", device="cuda:1", max_num_batched_tokens=511))[0]
    assert pitfalls(EngineConfig(model="m", device="cuda", max_num_batched_tokens=512)) == []
    assert pitfalls(EngineConfig(model="m", device="cpu", max_num_batched_tokens=64)) == []
    assert "no effect" in pitfalls(EngineConfig(model="m", trace_content=True))[0]
    assert pitfalls(EngineConfig(model="m", device="cuda", max_num_batched_tokens=64, enable_chunked_prefill=False)) == []


def test_memory_utilisation_defaults_to_ninety_percent_and_more_than_95_is_a_pitfall():
    assert EngineConfig(model="m").gpu_memory_utilization == 0.9
    assert "0.96" in pitfalls(EngineConfig(model="m", gpu_memory_utilization=0.96))[0]


def test_a_secret_is_shown_neither_in_the_log_nor_in_an_error():
    assert shown(EngineConfig(model="m", api_key="hunter2")) == {"model": "m", "api_key": "***"}
    with pytest.raises(ConfigError) as caught:
        checked(EngineConfig(model="m", api_key=31337))
    assert "31337" not in str(caught.value)


def test_only_what_differs_from_the_defaults_is_shown():
    assert shown(EngineConfig(model="m", block_size=16, max_num_seqs=3)) == {"model": "m", "max_num_seqs": 3}
