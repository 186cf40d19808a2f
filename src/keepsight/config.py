"""User configuration: validated once, frozen, unknown names refused.

Holds only what the user set. Values that follow from it and from the machine (device, precision, context length, cache
sizes) are derived where they are used and logged there with the reason.
"""

import dataclasses
import ipaddress
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from keepsight import demo
from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.image_processor_config import RESAMPLES, check_options
from keepsight.lora import check_adapter_name
from keepsight.media import DEFAULT_MAX_PIXELS, KINDS, MAX_PIXELS
from keepsight.other_options import explain_option
from keepsight.processor_config import OPERATOR_OPTIONS

logger = logging.getLogger(__name__)

# What options in GB count in.
GIB = 2**30
MAX_LORA_RANK = 512
# The first is the default.
HASHER_ALGORITHMS = ("blake3", "sha256", "sha512")
# Read if the option is not set: a site that allows only certified algorithms sets it once for all servers.
HASHER_VARIABLE = "KEEPSIGHT_MM_HASHER_ALGORITHM"
# Addresses that stand for the IPv4 address in their last four bytes: mapped ones, and those of NAT64.
IPV4_WITHIN_IPV6 = (ipaddress.IPv6Network("::ffff:0:0/96"), ipaddress.IPv6Network("64:ff9b::/96"))

# The allowed values of each option. None is also allowed where it is the default.
CHOICES: Mapping[str, tuple[object, ...]] = {
    "dtype": ("auto", "float32", "bfloat16"),
    "device": ("auto", "cpu", "cuda"),
    "model_impl": ("auto", "keepsight", "transformers"),
    "quantization": ("int8",),
    # As in vLLM: speed of each answer, or total throughput.
    "performance_mode": ("interactivity", "throughput"),
    "image_backend": tuple(RESAMPLES),
    "mm_hasher_algorithm": HASHER_ALGORITHMS,
    "mm_cache_device": ("auto", "cpu", "gpu"),
    # For tiers.
    "encoder_cache_policy": ("auto", "lru", "cost"),
    "block_size": (8, 16, 32, 64, 128),
    "mm_processor_cache_type": ("lru", "shm", "shared"),
}
LEAST_INTEGERS = {
    "max_model_len": 1,
    "max_num_batched_tokens": 1,
    "max_num_seqs": 1,
    "max_prompt_tokens_beside_streams": 0,
    "guess_up_to": 0,
    "num_gpu_blocks_override": 1,
    "kv_cache_memory_bytes": 1,
    "encoder_cache_size": 0,
    "max_mm_cache_bytes": 0,
    "max_num_encoder_input_tokens": 1,
    "media_workers": 1,
    "max_image_pixels": 1,
    "max_media_bytes": 1,
    "max_request_media_bytes": 1,
    "media_url_cache_bytes": 0,
    "max_loras": 1,
    "max_lora_rank": 1,
}
# More than any machine has; as bytes these are still numbers that can be counted with.
MOST_GIB = 2**33
_TOO_MANY = "no machine has more"
# Upper limits, with the reason.
MOST: Mapping[str, tuple[int, str]] = {
    "max_image_pixels": (MAX_PIXELS, "no decoder takes more"),
    "max_lora_rank": (MAX_LORA_RANK, "a larger adapter costs as much as the model"),
    "encoder_cache_gb": (MOST_GIB, _TOO_MANY),
    "encoder_host_cache_gb": (MOST_GIB, _TOO_MANY),
    "encoder_remote_cache_gb": (MOST_GIB, _TOO_MANY),
    "mm_processor_cache_gb": (MOST_GIB, _TOO_MANY),
    "mm_shm_cache_max_object_size_mb": (MOST_GIB * 1024, _TOO_MANY),
}
# For each number: the check, and how messages describe the valid range.
NUMBERS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "gpu_memory_utilization": (lambda part: 0 < part <= 1, "above 0 and at most 1"),
    "encoder_share": (lambda part: 0 < part < 1, "above 0 and below 1"),
    "verify_hits": (lambda part: 0 <= part <= 1, "from 0 to 1"),
    "encoder_cache_gb": (lambda size: 0 <= size < math.inf, "of at least 0"),
    "encoder_host_cache_gb": (lambda size: 0 <= size < math.inf, "of at least 0"),
    "encoder_remote_cache_gb": (lambda size: 0 < size < math.inf, "of GiB above 0"),
    "mm_processor_cache_gb": (lambda size: 0 <= size < math.inf, "of at least 0"),
    "mm_shm_cache_max_object_size_mb": (lambda size: 0 < size < math.inf, "above 0"),
    "media_fetch_timeout": (lambda seconds: 0 < seconds < math.inf, "of seconds above 0"),
}
PATHS = {"model": "a path", "generation_config": "auto, none or a path", "record_cache_trace": "a file"}
# Alternative ways to set one thing: at most one of each line may be given.
ONE_OF = (
    ("num_gpu_blocks_override", "kv_cache_memory_bytes"),
    ("encoder_cache_gb", "encoder_cache_size", "max_mm_cache_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    # A checkpoint's folder; None: the demo checkpoint that comes with the package.
    model: str | Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    # Whose modules run the model: ours, transformers', or ours where the architecture has any ("auto").
    model_impl: str = "auto"
    # On a CPU: the decoder's matrices are rounded to integers, with a scale per output channel.
    quantization: str | None = None
    # On a GPU: use only torch's operations, each launched separately.
    enforce_eager: bool = False
    # None: what the checkpoint was trained for, or less if it would not fit.
    max_model_len: int | None = None
    # Source of default sampling parameters: the checkpoint ("auto"), a file or folder, or "none".
    generation_config: str | Path = "auto"
    # Which of the reference's two image processors the pixels equal.
    image_backend: str = "torchvision"
    # Options of the picture and film processors, overriding the checkpoint; some may also be given by a request.
    mm_processor_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Hash that names pictures; None: the one in KEEPSIGHT_MM_HASHER_ALGORITHM, else blake3.
    mm_hasher_algorithm: str | None = None
    # Whether the UUID in a picture's metadata (EXIF ImageID) is trusted to identify its content.
    trust_exif_image_id: bool = False
    # Whether a caller may send embeddings in place of a picture; the model is shown whatever they contain.
    enable_mm_embeds: bool = False
    # The same, in place of a whole prompt's tokens.
    enable_prompt_embeds: bool = False

    # Whether requests may name adapters: those in `lora_modules`, each with a `name`, a `path` and, for display only, a
    # `base_model_name`; with `LLM` others, too. Loaded adapters stay in memory, at most `max_loras` of them.
    enable_lora: bool = False
    lora_modules: Sequence[Mapping[str, str]] = dataclasses.field(default_factory=list)
    max_loras: int = 8
    max_lora_rank: int = 16

    # Limits of one step: tokens, and sequences that they belong to.
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    # While answers stream, up to this many prompt tokens join their batch; longer prompts are computed beside it.
    max_prompt_tokens_beside_streams: int | None = None
    # Steps with fewer tokens are filled up to this many with guesses of the answers' next tokens; 0: none are made.
    guess_up_to: int | None = None
    # `LLM` defaults to throughput, as its answers are not read while they are generated.
    performance_mode: str = "interactivity"

    block_size: int = 16
    enable_prefix_caching: bool = True
    # A folder where the keys and values of prompts outlive the server; same forms as `encoder_disk_cache` below.
    prefix_disk_cache: str | Path | bool | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    # Applies to CUDA devices; on a CPU, memory is never taken whole.
    gpu_memory_utilization: float = 0.9

    # Size of the encoder cache in GiB, in embeddings or in bytes; 0: nothing is kept for other requests.
    encoder_cache_gb: float | None = None
    encoder_cache_size: int | None = None
    max_mm_cache_bytes: int | None = None
    # Where the embeddings are stored; auto: on the model's device.
    mm_cache_device: str = "auto"
    # Tiers, which keep embeddings that the encoder cache evicts: GiB of host memory (None: by available memory), a
    # folder as PATH, PATH:SIZE or :SIZE (True: the default folder), the address of a server that speaks the Redis
    # protocol and GiB of its memory (None: as much as it accepts).
    encoder_host_cache_gb: float | None = None
    encoder_disk_cache: str | Path | bool | None = None
    encoder_remote_cache: str | None = None
    encoder_remote_cache_gb: float | None = None
    # Eviction order of a full tier.
    encoder_cache_policy: str = "auto"
    # File to which each use of a picture's embeddings is appended, under an anonymous name.
    record_cache_trace: str | Path | None = None
    # Limit of embeddings whose pictures are encoded at the same time.
    max_num_encoder_input_tokens: int | None = None
    # As in vLLM: prefill never splits a picture. Always so for models whose picture tokens attend in both directions.
    disable_chunked_mm_input: bool = False
    # The fraction of the machine that encoding may take while answers stream.
    encoder_share: float = 0.5
    # Size of the processor cache in GiB of pixels (None: by available memory); 0: none are kept for other requests.
    mm_processor_cache_gb: float | None = None
    # Where they are stored (None: the fastest way available), and MiB of the largest picture in the ring of `shm`.
    mm_processor_cache_type: str | None = None
    mm_shm_cache_max_object_size_mb: float = 128
    # Fraction (0 to 1) of the processor cache's hits that are recomputed and compared bit for bit.
    verify_hits: float = 0.0
    # Processes that decode and resize pictures, as many for films and as many for looks (threads in `LLM`); None: one
    # for each core.
    media_workers: int | None = None

    # Limits of a request: the number of pictures, films and sounds, including those of earlier turns; pixels (of a
    # picture or a frame) and bytes of one of them; bytes of all.
    limit_mm_per_prompt: Mapping[str, int] = dataclasses.field(
        default_factory=lambda: {"image": 256, "video": 16, "audio": 16}
    )
    max_image_pixels: int = DEFAULT_MAX_PIXELS
    max_media_bytes: int = 64 * 2**20
    max_request_media_bytes: int = 128 * 2**20
    # Allowed sources of media: a folder (None: no files), these hosts (None: any public one), and these networks.
    allowed_local_media_path: str | Path | None = None
    allowed_media_domains: Sequence[str] | None = None
    allowed_media_networks: Sequence[str] = dataclasses.field(default_factory=list)
    # Timeout in seconds for a request's downloads, and bytes of downloads that are cached by URL.
    media_fetch_timeout: float = 10
    media_url_cache_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                _check_value(field.name, value)
        if not isinstance(self.mm_processor_kwargs, dict):
            raise InvalidArgumentError("mm_processor_kwargs", f"must be a dict, not {self.mm_processor_kwargs!r}")
        check_options(self.mm_processor_kwargs, OPERATOR_OPTIONS)
        self._check_media_sources()
        self._check_tiers()
        self._check_adapters()
        for names in ONE_OF:
            _check_is_given_once({name: getattr(self, name) for name in names})

    def _check_media_sources(self) -> None:
        _check_limits("limit_mm_per_prompt", self.limit_mm_per_prompt)
        folder = self.allowed_local_media_path
        if folder is not None and not _is_folder(folder):
            reason = f"must be an existing, accessible folder, not {folder!r}"
            raise InvalidArgumentError("allowed_local_media_path", reason)
        if self.allowed_media_domains is not None:
            _check_each("allowed_media_domains", self.allowed_media_domains, _is_host, "a host such as a.example.org")
        _check_each("allowed_media_networks", self.allowed_media_networks, _is_network, "a network such as 10.0.0.0/8")
        for network in map(ipaddress.ip_network, self.allowed_media_networks):
            if isinstance(network, ipaddress.IPv6Network) and any(map(network.subnet_of, IPV4_WITHIN_IPV6)):
                reason = f"{str(network)!r} stands for IPv4 addresses: give their own network, such as 10.0.0.0/8"
                raise InvalidArgumentError("allowed_media_networks", reason)

    def _check_adapters(self) -> None:
        example = "an adapter such as {'name': 'sql', 'path': 'FOLDER'}"
        _check_each("lora_modules", self.lora_modules, _is_adapter, example)
        names = [each["name"] for each in self.lora_modules]
        for name in names:
            check_adapter_name(name, "lora_modules")
            if names.count(name) > 1:
                raise InvalidArgumentError("lora_modules", f"{name!r} is listed twice")
        if names and not self.enable_lora:
            raise InvalidArgumentError("lora_modules", "needs enable_lora")
        if len(names) > self.max_loras:
            raise InvalidArgumentError(
                "lora_modules", f"must be at most {self.max_loras} (max_loras), not {len(names)}"
            )

    def _check_tiers(self) -> None:
        for name in ("encoder_disk_cache", "prefix_disk_cache"):
            if not isinstance(place := getattr(self, name), str | Path | bool | None):
                raise InvalidArgumentError(name, f"must be PATH, PATH:SIZE, :SIZE or True, not {place!r}")
        if self.has_prefix_disk and not self.enable_prefix_caching:
            reason = "but enable_prefix_caching is off (--no-enable-prefix-caching): nothing would be kept"
            raise InvalidArgumentError("prefix_disk_cache", f"is {self.prefix_disk_cache!r}, {reason}")
        if not isinstance(self.encoder_remote_cache, str | None) or self.encoder_remote_cache == "":
            raise InvalidArgumentError(
                "encoder_remote_cache", f"must be an address such as redis://host, not {self.encoder_remote_cache!r}"
            )
        if self.encoder_remote_cache_gb is not None and self.encoder_remote_cache is None:
            raise InvalidArgumentError(
                "encoder_remote_cache_gb", f"is {self.encoder_remote_cache_gb}, but encoder_remote_cache is not set"
            )
        if self.keeps_embeddings_for_others:
            return
        for name in ("encoder_host_cache_gb", "encoder_disk_cache", "encoder_remote_cache"):
            if (value := getattr(self, name)) not in (None, False):
                raise InvalidArgumentError(
                    name, f"is {value!r}, but an encoder cache of 0 keeps nothing for other requests, not even in tiers"
                )

    @property
    def adapter_folders(self) -> dict[str, Path]:
        """The folder of each configured adapter, by name."""
        return {each["name"]: Path(each["path"]) for each in self.lora_modules}

    @property
    def keeps_embeddings_for_others(self) -> bool:
        return 0 not in (self.encoder_cache_gb, self.encoder_cache_size, self.max_mm_cache_bytes)

    @property
    def has_far_embeddings(self) -> bool:
        """True if embeddings are kept in tiers that outlive the engine, and so may hold some that it never saw."""
        return self.encoder_disk_cache not in (None, False) or self.encoder_remote_cache is not None

    @property
    def has_far_tiers(self) -> bool:
        """True if any tier outlives the engine: of embeddings, or of keys and values, which make those unnecessary."""
        return self.has_far_embeddings or self.has_prefix_disk

    @property
    def has_prefix_disk(self) -> bool:
        return self.prefix_disk_cache not in (None, False)

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                otherwise = f"is not an option; {_ON_VLLM}; known are {', '.join(known)}"
                raise UnsupportedFieldError(name, explain_option(name, known, spell=repr) or otherwise)
        return cls(**options)

    @property
    def directory(self) -> Path:
        # Not `Path.expanduser`, which raises for an unknown user.
        return demo.checkpoint_path() if self.model is None else Path(os.path.expanduser(self.model))  # noqa: PTH111

    @property
    def model_name(self) -> str:
        return "keepsight-demo" if self.model is None else str(self.model)


_ON_VLLM = "docs/quickstart.md, Coming from vLLM, says what stands for vLLM's"

SWITCHES = frozenset(field.name for field in dataclasses.fields(Config) if field.type is bool)


def resolve_hasher_algorithm(configured: str | None) -> str:
    """Return the configured algorithm, else the environment's, else the default."""
    if configured is not None:
        return configured
    found = os.environ.get(HASHER_VARIABLE)
    if not found:
        return HASHER_ALGORITHMS[0]
    _check_choice(HASHER_VARIABLE, found, HASHER_ALGORITHMS)
    logger.info("pictures are identified by %s hashes, as %s says", found, HASHER_VARIABLE)
    return found


def _check_value(name: str, value: object) -> None:
    if name == "mm_processor_cache_type" and value == "processor_only":
        allowed = "must be one of lru, shm, shared, or left out"
        raise InvalidArgumentError(name, f"{allowed}: lru and shm become processor_only where they cannot be used")
    if name in CHOICES:
        _check_choice(name, value, CHOICES[name])
    elif name in LEAST_INTEGERS:
        if type(value) is not int or value < LEAST_INTEGERS[name]:
            raise InvalidArgumentError(name, f"must be an integer of at least {LEAST_INTEGERS[name]}, not {value!r}")
        _check_most(name, value)
    elif name in NUMBERS:
        holds, described = NUMBERS[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
            raise InvalidArgumentError(name, f"must be a number {described}, not {value!r}")
        _check_most(name, value)
    elif name in PATHS:
        # An empty path would mean the current directory.
        if not isinstance(value, str | Path) or value == "":
            raise InvalidArgumentError(name, f"must be {PATHS[name]}, not {value!r}")
    elif name in SWITCHES and not isinstance(value, bool):
        raise InvalidArgumentError(name, f"must be True or False, not {value!r}")


def _check_most(name: str, value: float) -> None:
    most, reason = MOST.get(name, (math.inf, ""))
    if value > most:
        raise InvalidArgumentError(name, f"must be at most {most}, not {value}: {reason}")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    # 16.0 and True compare equal to integers, but are not valid sizes.
    if value not in choices or type(value) is not type(choices[0]):
        raise InvalidArgumentError(name, f"must be one of {', '.join(map(str, choices))}, not {value!r}")


def _check_limits(name: str, limits: object) -> None:
    if not isinstance(limits, Mapping):
        raise InvalidArgumentError(name, f"must be a mapping such as {{'image': 8}}, not {limits!r}")
    for kind, limit in limits.items():
        if kind not in KINDS:
            raise InvalidArgumentError(name, f"must be for {', '.join(KINDS)}, not for {kind!r}")
        if type(limit) is not int or limit < 0:
            raise InvalidArgumentError(name, f"for {kind} must be an integer of at least 0, not {limit!r}")


def _check_each(name: str, values: object, holds: Callable[[object], bool], described: str) -> None:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InvalidArgumentError(name, f"must be a list, not {values!r}")
    for value in values:
        if not holds(value):
            raise InvalidArgumentError(name, f"{value!r} is not {described}")


def _is_adapter(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and {"name", "path"} <= value.keys() <= {"name", "path", "base_model_name"}
        and all(isinstance(each, str) and each for each in value.values())
    )


def _is_folder(named: object) -> bool:
    try:
        return isinstance(named, str | Path) and named != "" and Path(named).is_dir()
    except OSError:  # inside another user's folder, or the name is too long
        return False


def _is_host(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return re.fullmatch(r"[\w.-]+", value.encode("idna").decode()) is not None
    except UnicodeError:
        return False


def _is_network(value: object) -> bool:
    try:
        ipaddress.ip_network(str(value))
    except ValueError:
        return False
    return isinstance(value, str)


def _check_is_given_once(options: Mapping[str, object]) -> None:
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise InvalidArgumentError(given[1], f"sets the same as {given[0]} in another unit: give only one of them")
