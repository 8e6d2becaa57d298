"""Sizes of a simulated device: from the configuration and from the model's config.json."""

from __future__ import annotations

import json

import pytest

from repertory.gpu.simulated import open_simulated
from repertory.protocol.config import EngineConfig
from repertory.protocol.errors import ConfigError, ModelLoadError


@pytest.fixture
def model_dir(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 321, "max_position_embeddings": 640, "hidden_size": 8}))
    return tmp_path


def test_sizes_come_from_the_model_and_the_configuration(model_dir):
    config = EngineConfig(model="m", num_device_blocks=7, num_host_blocks=3, block_size=8, max_model_len=64)
    capacity = open_simulated(config, model_dir).capacity
    assert (capacity.vocab_size, capacity.max_model_len, capacity.block_size) == (321, 64, 8)
    assert (capacity.num_device_blocks, capacity.num_host_blocks) == (7, 3)


def test_what_is_not_said_has_a_default(model_dir):
    capacity = open_simulated(EngineConfig(model="m"), model_dir).capacity
    assert (capacity.max_model_len, capacity.num_device_blocks, capacity.num_host_blocks) == (640, 1024, 1024)
    capacity = open_simulated(EngineConfig(model="m"), None).capacity
    assert capacity.vocab_size > 1000
    assert capacity.max_model_len > 1000


def test_no_host_tier_means_no_host_blocks(model_dir):
    assert open_simulated(EngineConfig(model="m", kv_offloading_size=0), model_dir).capacity.num_host_blocks == 0
    config = EngineConfig(model="m", num_host_blocks=0)
    assert open_simulated(config, model_dir).capacity.num_host_blocks == 0


def test_a_length_the_model_does_not_have_is_refused(model_dir):
    with pytest.raises(ConfigError, match="max_model_len 641 is more than the model's 640") as caught:
        open_simulated(EngineConfig(model="m", max_model_len=641), model_dir)
    assert caught.value.key == "max_model_len"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"vocab_size": 5}', '{"vocab_size": "5", "max_position_embeddings": 9}',
     '{"vocab_size": 0, "max_position_embeddings": 9}'],
)  # fmt: skip
def test_an_unusable_config_json_is_refused_by_name(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        open_simulated(EngineConfig(model="m"), tmp_path)


def test_a_missing_config_json_is_refused_by_name(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        open_simulated(EngineConfig(model="m"), tmp_path)
