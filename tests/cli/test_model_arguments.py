"""The flags are exactly `Config`'s options, with the same defaults."""

import argparse
import dataclasses
from typing import Any

import pytest

from keepsight.cli.model_arguments import add_model_arguments, config_from
from keepsight.config import Config


def parse(*arguments: str) -> Config:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    add_model_arguments(parser, takes_adapters=True)
    return config_from(parser.parse_args(arguments))


def test_without_flags_the_configuration_is_the_default() -> None:
    assert parse() == Config()


FLAGS_AND_VALUES: dict[str, tuple[tuple[str, ...], Any]] = {
    "model": (("--model", "somewhere"), "somewhere"),
    "dtype": (("--dtype", "bfloat16"), "bfloat16"),
    "device": (("--device", "cpu"), "cpu"),
    "model_impl": (("--model-impl", "transformers"), "transformers"),
    "quantization": (("--quantization", "int8"), "int8"),
    "enforce_eager": (("--enforce-eager",), True),
    "max_model_len": (("--max-model-len", "100"), 100),
    "generation_config": (("--generation-config", "none"), "none"),
    "image_backend": (("--image-backend", "pil"), "pil"),
    "mm_processor_kwargs": (("--mm-processor-kwargs", '{"do_pan_and_scan": true}'), {"do_pan_and_scan": True}),
    "mm_hasher_algorithm": (("--mm-hasher-algorithm", "sha256"), "sha256"),
    "trust_exif_image_id": (("--trust-exif-image-id",), True),
    "enable_mm_embeds": (("--enable-mm-embeds",), True),
    "enable_prompt_embeds": (("--enable-prompt-embeds",), True),
    "max_num_batched_tokens": (("--max-num-batched-tokens", "999"), 999),
    "max_num_seqs": (("--max-num-seqs", "9"), 9),
    "max_prompt_tokens_beside_streams": (("--max-prompt-tokens-beside-streams", "0"), 0),
    "guess_up_to": (("--guess-up-to", "0"), 0),
    "performance_mode": (("--performance-mode", "throughput"), "throughput"),
    "block_size": (("--block-size", "32"), 32),
    "enable_prefix_caching": (("--no-enable-prefix-caching",), False),
    "num_gpu_blocks_override": (("--num-gpu-blocks-override", "50"), 50),
    "kv_cache_memory_bytes": (("--kv-cache-memory-bytes", "5000000"), 5_000_000),
    "gpu_memory_utilization": (("--gpu-memory-utilization", "0.5"), 0.5),
    "encoder_cache_gb": (("--encoder-cache-gb", "0"), 0.0),
    "encoder_cache_size": (("--encoder-cache-size", "4096"), 4096),
    "max_mm_cache_bytes": (("--max-mm-cache-bytes", "1000"), 1000),
    "mm_cache_device": (("--mm-cache-device", "cpu"), "cpu"),
    "encoder_host_cache_gb": (("--encoder-host-cache-gb", "0.5"), 0.5),
    "encoder_disk_cache": (("--encoder-disk-cache", "/x:64G"), "/x:64G"),
    "prefix_disk_cache": (("--prefix-disk-cache", "/x:64G"), "/x:64G"),
    "encoder_remote_cache": (("--encoder-remote-cache", "redis://x"), "redis://x"),
    "encoder_remote_cache_gb": (("--encoder-remote-cache", "redis://x", "--encoder-remote-cache-gb", "2"), 2.0),
    "encoder_cache_policy": (("--encoder-cache-policy", "cost"), "cost"),
    "record_cache_trace": (("--record-cache-trace", "trace"), "trace"),
    "max_num_encoder_input_tokens": (("--max-num-encoder-input-tokens", "512"), 512),
    "disable_chunked_mm_input": (("--disable-chunked-mm-input",), True),
    "encoder_share": (("--encoder-share", "0.25"), 0.25),
    "mm_processor_cache_gb": (("--mm-processor-cache-gb", "0.5"), 0.5),
    "mm_processor_cache_type": (("--mm-processor-cache-type", "shm"), "shm"),
    "mm_shm_cache_max_object_size_mb": (("--mm-shm-cache-max-object-size-mb", "64"), 64.0),
    "verify_hits": (("--verify-hits", "0.25"), 0.25),
    "media_workers": (("--media-workers", "3"), 3),
    "limit_mm_per_prompt": (("--limit-mm-per-prompt", '{"image": 8}'), {"image": 8}),
    "max_image_pixels": (("--max-image-pixels", "1000"), 1000),
    "max_media_bytes": (("--max-media-bytes", "1000"), 1000),
    "max_request_media_bytes": (("--max-request-media-bytes", "1000"), 1000),
    "allowed_local_media_path": (("--allowed-local-media-path", "/"), "/"),
    "allowed_media_domains": (("--allowed-media-domains", "a.org", "b.org"), ["a.org", "b.org"]),
    "allowed_media_networks": (("--allowed-media-networks", "10.0.0.0/8"), ["10.0.0.0/8"]),
    "media_fetch_timeout": (("--media-fetch-timeout", "2.5"), 2.5),
    "enable_lora": (("--enable-lora",), True),
    "lora_modules": (
        ("--enable-lora", "--lora-modules", "a=/x", '{"name": "b", "path": "y", "base_model_name": "z"}'),
        [{"name": "a", "path": "/x"}, {"name": "b", "path": "y", "base_model_name": "z"}],
    ),
    "max_loras": (("--max-loras", "2"), 2),
    "max_lora_rank": (("--max-lora-rank", "64"), 64),
    "media_url_cache_bytes": (("--media-url-cache-bytes", "0"), 0),
}

# Other options that an option requires.
REQUIRED_OPTIONS: dict[str, dict[str, Any]] = {
    "encoder_remote_cache_gb": {"encoder_remote_cache": "redis://x"},
    "lora_modules": {"enable_lora": True},
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Config)])
def test_every_option_has_its_flag(name: str) -> None:
    arguments, value = FLAGS_AND_VALUES[name]
    expected: dict[str, Any] = {**REQUIRED_OPTIONS.get(name, {}), name: value}
    assert parse(*arguments) == Config(**expected)
    assert parse(*arguments) != Config()


def test_a_flag_of_several_values_may_come_several_times() -> None:
    twice = parse("--enable-lora", "--lora-modules", "a=/x", "--lora-modules", "b=/y")
    assert [each["name"] for each in twice.lora_modules] == ["a", "b"]
    domains = parse("--allowed-media-domains", "a.org", "b.org", "--allowed-media-domains", "c.org")
    assert domains.allowed_media_domains == ["a.org", "b.org", "c.org"]


def test_adapter_flags_exist_only_for_commands_that_take_adapters() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    add_model_arguments(parser)
    assert config_from(parser.parse_args([])) == Config()
    with pytest.raises(SystemExit):
        parser.parse_args(["--enable-lora"])


def test_prefix_caching_may_be_enabled_explicitly() -> None:
    assert parse("--enable-prefix-caching").enable_prefix_caching


def test_a_disk_cache_flag_needs_no_path() -> None:
    assert parse("--encoder-disk-cache").encoder_disk_cache is True
    assert parse("--encoder-disk-cache").has_far_embeddings
    assert parse("--prefix-disk-cache").prefix_disk_cache is True
    assert parse("--prefix-disk-cache").has_far_tiers


def test_limits_of_pictures_may_be_given_without_json() -> None:
    assert parse("--limit-mm-per-prompt", "image=8, video=0").limit_mm_per_prompt == {"image": 8, "video": 0}


@pytest.mark.parametrize(
    ("text", "bytes_of_cache"),
    [("5000000", 5_000_000), ("32k", 32_000), ("32K", 32_768), ("5m", 5_000_000), ("4G", 4 * 2**30), ("4g", 4 * 10**9)],
)
def test_integers_may_have_the_suffixes_of_vllm(text: str, bytes_of_cache: int) -> None:
    assert parse("--kv-cache-memory-bytes", text).kv_cache_memory_bytes == bytes_of_cache


@pytest.mark.parametrize("text", ["", "k", "4kk", "1.5k", "auto", "4T"])
def test_what_is_no_integer_is_refused_with_examples(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--max-model-len", text)
    assert f"--max-model-len: invalid int value: {text!r}; such as 8192, 8k or 8K" in capsys.readouterr().err


def test_help_shows_the_default_media_limits_as_json() -> None:
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    assert """(default: {"image": 256, "video": 16, "audio": 16})""" in " ".join(parser.format_help().split())


@pytest.mark.parametrize("limits", ["8", "image", "image=many", '{"image": 8', ""])
def test_invalid_limits_are_refused(limits: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--limit-mm-per-prompt", limits)
    assert "is neither JSON" in capsys.readouterr().err
