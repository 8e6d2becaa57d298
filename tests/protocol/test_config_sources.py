"""Flags, variables and files: who wins, how text is read, and what each mistake is told."""

from pathlib import Path

import pytest

from repertory.protocol.config import FIELDS, pitfalls
from repertory.protocol.config_sources import load_config
from repertory.protocol.errors import ConfigError

SEED_ARTICLE = Path(__file__).with_name("seed_article.yaml")


@pytest.fixture
def write(tmp_path):
    def make(text):
        path = tmp_path / "engine.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return make


def load(**sources):
    return load_config(**{"flags": {"model": "demo"}, "environ": {}} | sources)


def refused(**sources):
    with pytest.raises(ConfigError) as caught:
        load(**sources)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- who wins ------------------------------------------------------------------------------------


def test_the_configuration_of_the_seed_article_loads_as_it_stands():
    config = load(file=SEED_ARTICLE)
    assert config.max_num_batched_tokens == 4096
    assert config.max_num_seqs == 256
    assert config.enable_chunked_prefill is True
    assert config.enable_prefix_caching is True
    assert config.preemption_mode == "recompute"
    assert config.max_prefill_batch_size == 4
    assert config.scheduling_delay_factor == 0.5
    assert config.gpu_memory_utilization == 0.9
    assert pitfalls(config) == []


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(write):
    file = write("block_size: 32\nport: 1\nseed: 1\n")
    environ = {"REPERTORY_PORT": "2", "REPERTORY_SEED": "2"}
    config = load_config(flags={"model": "demo", "seed": 3}, environ=environ, file=file)
    assert (config.seed, config.port, config.block_size, config.max_num_queued) == (3, 2, 32, 1024)


def test_a_command_may_have_defaults_of_its_own_and_every_source_wins_over_them(write):
    assert load(defaults={"log_level": "warning"}).log_level == "warning"
    assert load(defaults={"log_level": "warning"}, file=write("log_level: info")).log_level == "info"
    assert load(defaults={"log_level": "warning"}, environ={"REPERTORY_LOG_LEVEL": "debug"}).log_level == "debug"


def test_a_model_is_required_and_the_error_says_where_it_can_be_given():
    with pytest.raises(ConfigError, match=r"--model.*REPERTORY_MODEL") as caught:
        load_config(environ={})
    assert caught.value.key == "model"


def test_the_process_environment_is_read_unless_another_is_given(monkeypatch):
    monkeypatch.setenv("REPERTORY_BLOCK_SIZE", "64")
    assert load_config(flags={"model": "demo"}).block_size == 64
    assert load_config(flags={"model": "demo"}, environ={}).block_size == 16


@pytest.mark.parametrize("key", sorted(FIELDS))
def test_every_setting_can_be_given_by_each_source(key, write):
    text = {"device": "simulated", "model": "demo"}.get(key)
    value = text or next(v for v in (3.5, 0.5, 2, True, "auto", "swap", "inline", "info", "x") if _fits(key, v))
    assert getattr(load_config(flags={"model": "demo", key: value}, environ={}), key) == value
    variables = {"REPERTORY_MODEL": "demo", f"REPERTORY_{key.upper()}": str(value)}
    assert getattr(load_config(environ=variables), key) == value
    file = write(f"anything:\n  {key}: {str(value).lower() if value is True else value}\n")
    assert getattr(load_config(flags={} if key == "model" else {"model": "demo"}, environ={}, file=file), key) == value


def _fits(key, value):
    try:
        load(flags={"model": "demo", key: value})
    except ConfigError:
        return False
    return True


# ---- variables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["true", "1", "yes", "on", "TRUE", " On "])
def test_words_for_true_in_a_variable(text):
    assert load(environ={"REPERTORY_ENFORCE_EAGER": text}).enforce_eager is True


@pytest.mark.parametrize("text", ["false", "0", "no", "off", "False"])
def test_words_for_false_in_a_variable(text):
    assert load(environ={"REPERTORY_ENABLE_PREFIX_CACHING": text}).enable_prefix_caching is False


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("REPERTORY_ENFORCE_EAGER", "maybe", "true or false"),
        ("REPERTORY_ENFORCE_EAGER", "2", "true or false"),
        ("REPERTORY_ENFORCE_EAGER", "none", "true or false"),
        ("REPERTORY_BLOCK_SIZE", "many", "an integer"),
        ("REPERTORY_BLOCK_SIZE", "0", "at least 1"),
        ("REPERTORY_BLOCK_SIZE", "true", "an integer"),
        ("REPERTORY_BLOCK_SIZE", "none", "an integer"),
        ("REPERTORY_BLOCK_SIZE", "16 tokens", "an integer"),
        ("REPERTORY_BLOCK_SIZE", "16.5", "an integer"),
        ("REPERTORY_GPU_MEMORY_UTILIZATION", "90%", "a number"),
        ("REPERTORY_MAX_PAUSE_S", "inf", "a number"),
        ("REPERTORY_MAX_PAUSE_S", "nan", "a number"),
        ("REPERTORY_PREEMPTION_MODE", "swop", "one of auto, heuristic, recompute, swap"),
    ],
)
def test_a_malformed_variable_stops_the_start_with_its_name_value_and_type(name, text, expected):
    message = refused(environ={name: text})
    assert message.startswith(f"{name}: ")
    assert text[:20] in message
    assert expected in message
    assert len(message) < 250


def test_an_endless_number_in_a_variable_gets_a_short_error():
    message = refused(environ={"REPERTORY_MAX_NUM_SEQS": "9" * 500})
    assert message.startswith("REPERTORY_MAX_NUM_SEQS: ")
    assert len(message) < 250


def test_a_malformed_variable_is_not_ignored_even_if_a_flag_wins():
    assert "REPERTORY_PORT" in refused(flags={"model": "demo", "port": 1}, environ={"REPERTORY_PORT": "http"})


@pytest.mark.parametrize("name", ["REPERTORY_PORT", "REPERTORY_API_KEY", "REPERTORY_ENFORCE_EAGER"])
def test_an_empty_variable_is_refused_because_its_meaning_is_unclear(name):
    assert f"{name} is empty" in refused(environ={name: ""})


def test_none_unsets_what_a_file_has_set(write):
    file = write("seed: 3\ntarget_itl_ms: 50")
    config = load(file=file, environ={"REPERTORY_SEED": "none", "REPERTORY_TARGET_ITL_MS": "NULL"})
    assert (config.seed, config.target_itl_ms) == (None, None)


def test_an_unknown_variable_stops_the_start_with_a_suggestion():
    message = refused(environ={"REPERTORY_BLOCKSIZE": "16"})
    assert "REPERTORY_BLOCKSIZE is unknown; did you mean REPERTORY_BLOCK_SIZE?" in message


@pytest.mark.parametrize("name", ["REPERTORY_", "REPERTORY_block_size", "REPERTORY_QQQQ"])
def test_a_variable_with_the_prefix_and_no_setting_is_refused(name):
    assert name in refused(environ={name: "1"})


def test_variables_that_are_no_settings_pass():
    load(environ={"REPERTORY_CACHE": "", "REPERTORYX": "1", "PATH": "x", "repertory_port": "x", "MY_REPERTORY_PORT": "x"})


def test_a_secret_in_a_variable_keeps_its_exact_text():
    assert load(environ={"REPERTORY_API_KEY": " 007 "}).api_key == " 007 "
    assert load(environ={"REPERTORY_API_KEY": "none"}).api_key == "none"


# ---- flags ---------------------------------------------------------------------------------------


def test_flags_come_in_kebab_or_snake_case_typed_or_as_text():
    config = load(flags={"--model": "demo", "block-size": "32", "max_num_seqs": 4, "enforce-eager": "yes"})
    assert (config.block_size, config.max_num_seqs, config.enforce_eager) == (32, 4, True)


def test_a_flag_out_of_range_is_named_as_it_is_written():
    assert refused(flags={"model": "demo", "block_size": 0}).startswith("--block-size: 0 is not allowed")


def test_an_unknown_flag_is_refused_with_a_suggestion():
    message = refused(flags={"model": "demo", "max_seqs": 1})
    assert "--max-seqs is unknown; did you mean --max-num-seqs?" in message


def test_rules_between_settings_hold_whatever_their_sources(write):
    message = refused(file=write("speculative_window: 300"), environ={"REPERTORY_MAX_NUM_BATCHED_TOKENS": "512"})
    assert "300" in message
    assert "512" in message


# ---- files ---------------------------------------------------------------------------------------


def test_keys_may_stand_at_the_top_or_under_any_headings_in_either_case(write):
    config = load(file=write("block-size: 32\nmemory:\n  host:\n    kv-offloading-size: 0\nserving: {port: 9}\n"))
    assert (config.block_size, config.kv_offloading_size, config.port) == (32, 0.0, 9)


def test_a_heading_may_be_called_like_a_setting(write):
    config = load_config(environ={}, file=write("model:\n  model: demo\n  dtype: float32\n"))
    assert (config.model, config.dtype) == ("demo", "float32")


def test_a_number_that_yaml_takes_for_text_is_a_number(write):
    assert load(file=write("scheduling_delay_s: 1e-3")).scheduling_delay_s == 0.001


def test_an_empty_file_sets_nothing(write):
    assert load(file=write("# nothing yet\n")).block_size == 16


def test_a_byte_order_mark_is_no_part_of_the_first_key(write):
    assert load(file=write(b"\xef\xbb\xbfblock_size: 32\n")).block_size == 32


def test_an_unknown_key_is_refused_with_its_place_and_a_suggestion(write):
    message = refused(file=write("scheduler:\n  max_num_seq: 3\n"))
    assert "engine.yaml" in message
    assert "scheduler.max_num_seq is unknown; did you mean max_num_seqs?" in message


@pytest.mark.parametrize("text", ["1: 2", "scheduler: [block_size]", "scheduler: 3", "true: 1", "scheduler:\n"])
def test_what_is_neither_a_setting_nor_a_heading_is_refused(text, write):
    assert "is unknown" in refused(file=write(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("memory:\n  block_size: 0", "memory.block_size: 0 is not allowed; expected an integer, at least 1"),
        ("block_size: true", "block_size: True is not allowed"),
        ("block_size: [16]", "block_size: [16] is not allowed"),
        ("port: null", "port: None is not allowed"),
        ("kv_cache_dtype: no", "kv_cache_dtype: False is not allowed; expected text"),
        ("model: 2020-01-01", "is not allowed; expected text"),
        ("model: ''", "model is empty"),
    ],
)
def test_a_malformed_value_in_a_file_is_refused_with_its_place(text, expected, write):
    message = refused(file=write(text))
    assert "engine.yaml: " in message
    assert expected in message


def test_a_key_given_twice_with_different_values_is_refused_with_both_places(write):
    message = refused(file=write("scheduler:\n  port: 1\nserving:\n  port: 2\n"))
    assert "port is given twice: 1 (line 2) and 2 (line 4)" in message
    message = refused(file=write("scheduler: {port: 1}\nserving: {port: 2}\n"))
    assert "port is given twice: 1 (scheduler.port) and 2 (serving.port)" in message


def test_a_key_repeated_in_one_mapping_is_not_silently_the_last_one(write):
    assert "1 (line 1) and 2 (line 2)" in refused(file=write("port: 1\nport: 2\n"))
    assert "line 2" in refused(file=write("block-size: 16\nblock_size: 32\n"))


def test_a_key_given_twice_with_one_value_is_accepted(write):
    assert load(file=write("a:\n  port: 1\nb:\n  port: 1\n")).port == 1


def test_a_commented_out_line_does_not_count(write):
    assert load(file=write("port: 1\n# port: 2\n")).port == 1


def test_a_secret_given_twice_is_not_shown(write):
    message = refused(file=write("api_key: aaa111\nserving:\n  api_key: bbb222\n"))
    assert "api_key" in message
    assert "aaa111" not in message
    assert "bbb222" not in message


def test_a_file_that_is_missing_is_named(tmp_path):
    assert str(tmp_path / "none.yaml") in refused(file=tmp_path / "none.yaml")


def test_a_folder_is_no_file(tmp_path):
    assert str(tmp_path) in refused(file=tmp_path)


def test_a_file_that_is_not_yaml_is_refused_with_the_parsers_line(write):
    message = refused(file=write("block_size: 16\nport: [1\nseed: 2\n"))
    assert "engine.yaml" in message
    assert "line 2" in message


def test_bytes_that_are_no_text_are_refused(write):
    assert "UTF-8" in refused(file=write(b"model: \xff\xfe"))


@pytest.mark.parametrize("text", ["- port\n", "just text", "42"])
def test_a_file_that_is_no_mapping_is_refused(text, write):
    assert "must be a mapping" in refused(file=write(text))


def test_a_tag_that_would_run_code_is_refused(write):
    assert "not YAML" in refused(file=write("model: !!python/object/apply:os.getcwd []\n"))


def test_headings_without_end_are_refused(write):
    assert "nest deeper" in refused(file=write("a: &a\n  b: *a\n"))
