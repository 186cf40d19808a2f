import dataclasses
from pathlib import Path
from typing import Any

import pytest

from keepsight.config import HASHER_VARIABLE, Config, resolve_hasher_algorithm
from keepsight.demo import checkpoint_path
from keepsight.errors import InvalidArgumentError, UnsupportedFieldError


def test_the_default_model_is_the_demo() -> None:
    config = Config()
    assert (config.directory, config.model_name) == (checkpoint_path(), "keepsight-demo")


def test_a_model_s_folder_may_be_under_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert Config(model="~/models/gemma").directory == Path("/home/me/models/gemma")
    assert Config(model="~no-such-user/gemma").directory == Path("~no-such-user/gemma")


def test_the_model_name_is_the_given_path() -> None:
    for model in ("models/gemma", Path("models/gemma")):
        config = Config.from_options(model=model)
        assert (config.directory, config.model_name) == (Path("models/gemma"), "models/gemma")


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().dtype = "float32"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_model_length", "did you mean 'max_model_len'"),
        ("zzz", "known are model, dtype, device"),
        # vLLM options that resemble ours in spelling only.
        ("trust_remote_code", "is not needed: no code in the model's folder is run"),
        ("tensor_parallel_size", "does not exist: an engine uses one device"),
        # What stands for these is an option of `keepsight serve` only.
        ("disable_log_requests", "known are model, dtype, device"),
        ("disable_radix_cache", "known are model, dtype, device"),
        ("media_io_kwargs", "'mm_processor_kwargs' has fps"),
    ],
)
def test_an_unknown_option_is_refused_with_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(UnsupportedFieldError, match=hint) as caught:
        Config.from_options(**{name: 1})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", 5, "must be a path, not 5"),
        ("model", "", "must be a path, not ''"),
        ("dtype", "float16", "must be one of auto, float32, bfloat16, not 'float16'"),
        ("dtype", None, "must be one of"),
        ("quantization", "awq", "must be one of int8, not 'awq'"),
        ("dtype", ["auto"], "must be one of"),
        ("device", "tpu", "must be one of auto, cpu, cuda"),
        ("image_backend", "opencv", "must be one of torchvision, pil"),
        ("mm_hasher_algorithm", "md5", "must be one of blake3, sha256, sha512, not 'md5'"),
        ("mm_hasher_algorithm", "", "must be one of"),
        ("mm_processor_cache_type", "processor_only", "must be one of lru, shm, shared, or left out"),
        ("mm_processor_cache_type", "ram", "must be one of lru, shm, shared, not 'ram'"),
        ("mm_shm_cache_max_object_size_mb", 0, "must be a number above 0, not 0"),
        ("mm_shm_cache_max_object_size_mb", None, "must be a number above 0, not None"),
        ("lora_modules", [{"name": "a"}], "is not an adapter such as {'name': 'sql', 'path': 'FOLDER'}"),
        ("lora_modules", [{"name": "a", "path": "b", "int_id": "1"}], "is not an adapter such as"),
        ("lora_modules", [{"name": "a", "path": ""}], "is not an adapter such as"),
        ("lora_modules", [{"name": "a\n", "path": "b"}], "1 to 256 printable characters"),
        ("lora_modules", [{"name": "a", "path": "b"}] * 2, "'a' is listed twice"),
        ("lora_modules", [{"name": "a", "path": "b"}], "needs enable_lora"),
        ("max_lora_rank", 513, "must be at most 512, not 513"),
        ("max_model_len", 0, "an integer of at least 1, not 0"),
        ("limit_mm_per_prompt", 8, "must be a mapping such as"),
        ("limit_mm_per_prompt", {"picture": 8}, "must be for image, video, audio, not for 'picture'"),
        ("limit_mm_per_prompt", {"image": -1}, "for image must be an integer of at least 0, not -1"),
        ("max_image_pixels", 0, "an integer of at least 1, not 0"),
        ("max_image_pixels", 178_956_971, "at most 178956970, not 178956971"),
        ("max_image_pixels", None, "an integer of at least 1, not None"),
        ("max_media_bytes", 0, "an integer of at least 1, not 0"),
        ("max_request_media_bytes", 1.5, "an integer of at least 1, not 1.5"),
        ("media_url_cache_bytes", -1, "an integer of at least 0, not -1"),
        ("media_fetch_timeout", 0, "a number of seconds above 0, not 0"),
        ("allowed_local_media_path", "/no/such/folder", "must be an existing, accessible folder"),
        ("allowed_local_media_path", "", "must be an existing, accessible folder"),
        ("allowed_media_domains", "a.org", "must be a list, not 'a.org'"),
        ("allowed_media_domains", ["http://a.org"], "'http://a.org' is not a host"),
        ("allowed_media_domains", ["a..org"], "'a..org' is not a host"),
        ("allowed_media_networks", ["10.0.0.1/8"], "'10.0.0.1/8' is not a network"),
        ("allowed_media_networks", [7], "7 is not a network"),
        ("allowed_media_networks", ["64:ff9b::/96"], "'64:ff9b::/96' stands for IPv4 addresses: give their own"),
        ("allowed_media_networks", ["::ffff:10.0.0.0/104"], "stands for IPv4 addresses"),
        ("max_model_len", True, "an integer of at least 1, not True"),
        ("max_model_len", 1.5, "an integer of at least 1, not 1.5"),
        ("max_model_len", "1k", "an integer of at least 1, not '1k'"),
        ("max_num_batched_tokens", 0, "an integer of at least 1, not 0"),
        ("max_num_seqs", -1, "an integer of at least 1, not -1"),
        ("max_num_seqs", 2.0, "an integer of at least 1, not 2.0"),
        ("max_prompt_tokens_beside_streams", -1, "an integer of at least 0, not -1"),
        ("block_size", 24, "must be one of 8, 16, 32, 64, 128, not 24"),
        ("block_size", 16.0, "must be one of 8, 16, 32, 64, 128, not 16.0"),
        ("block_size", None, "must be one of 8, 16, 32, 64, 128, not None"),
        ("enable_prefix_caching", 1, "must be True or False, not 1"),
        ("disable_chunked_mm_input", None, "must be True or False, not None"),
        ("num_gpu_blocks_override", 0, "an integer of at least 1, not 0"),
        ("kv_cache_memory_bytes", 1e9, "an integer of at least 1, not 1000000000.0"),
        ("gpu_memory_utilization", 0, "a number above 0 and at most 1, not 0"),
        ("gpu_memory_utilization", 90, "a number above 0 and at most 1, not 90"),
        ("gpu_memory_utilization", True, "a number above 0 and at most 1, not True"),
        ("encoder_cache_gb", -1, "a number of at least 0, not -1"),
        ("encoder_cache_gb", float("nan"), "a number of at least 0, not nan"),
        ("encoder_cache_gb", float("inf"), "a number of at least 0, not inf"),
        ("encoder_cache_size", -1, "an integer of at least 0, not -1"),
        ("encoder_remote_cache_gb", 0, "a number of GiB above 0, not 0"),
        ("encoder_remote_cache_gb", 4, "is 4, but encoder_remote_cache is not set"),
        ("max_mm_cache_bytes", "4g", "an integer of at least 0, not '4g'"),
        ("mm_cache_device", "cuda", "must be one of auto, cpu, gpu, not 'cuda'"),
        ("max_num_encoder_input_tokens", 0, "an integer of at least 1, not 0"),
        ("encoder_share", 0, "a number above 0 and below 1, not 0"),
        ("encoder_share", 1, "a number above 0 and below 1, not 1"),
        ("encoder_share", "half", "a number above 0 and below 1, not 'half'"),
        ("mm_processor_cache_gb", -1, "a number of at least 0, not -1"),
        ("mm_processor_cache_gb", 1e300, r"at most 8589934592, not 1e\+300: no machine has more"),
        ("mm_shm_cache_max_object_size_mb", 1e308, "at most 8796093022208"),
        ("encoder_cache_gb", 1e300, "at most 8589934592"),
        ("encoder_host_cache_gb", 1e300, "at most 8589934592"),
        ("encoder_remote_cache_gb", 1e300, "at most 8589934592"),
        ("media_workers", 0, "an integer of at least 1, not 0"),
        ("mm_processor_kwargs", None, "must be a dict, not None"),
        ("mm_processor_kwargs", [1], "must be a dict"),
    ],
)
def test_an_invalid_value_is_refused_with_its_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        Config.from_options(**{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize("value", ["md5", "SHA256", "sha256 "])
def test_an_unknown_hasher_in_the_environment_is_refused_by_variable_name(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HASHER_VARIABLE, value)
    with pytest.raises(InvalidArgumentError, match="must be one of blake3, sha256, sha512") as caught:
        resolve_hasher_algorithm(None)
    assert caught.value.field == "KEEPSIGHT_MM_HASHER_ALGORITHM"
    assert resolve_hasher_algorithm("blake3") == "blake3"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("num_gpu_blocks_override", "kv_cache_memory_bytes"),
        ("encoder_cache_gb", "encoder_cache_size"),
        ("encoder_cache_gb", "max_mm_cache_bytes"),
        ("encoder_cache_size", "max_mm_cache_bytes"),
    ],
)
def test_two_options_for_the_same_size_are_refused(first: str, second: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"sets the same as {first} in another unit") as caught:
        Config.from_options(**{second: 1, first: 1})
    assert caught.value.field == second


def test_zero_counts_as_a_given_size() -> None:
    """0 is a given value; None is not."""
    config = Config(encoder_cache_gb=0)
    assert (config.encoder_cache_gb, config.encoder_cache_size) == (0, None)
    with pytest.raises(InvalidArgumentError, match="sets the same"):
        Config(encoder_cache_gb=0, encoder_cache_size=0)
