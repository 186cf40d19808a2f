"""Checkpoints of borrowed model families, without weights: tiny versions of the published processors.

Each has a byte-level tokenizer with its family's special tokens, and a shortened version of its family's template.
`load_reference` builds transformers' processor, the reference, by its class.
"""

import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from tests.byte_level_tokenizer import write_byte_level_tokenizer


def say_by_marker(marker: str) -> str:
    """Return a template that puts messages between `<|im_start|>` and `<|im_end|>`."""
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for content in message['content'] %}"
        f"{{% if content['type'] == 'image' %}}{{{{ '{marker}' }}}}{{% elif content['type'] == 'text' %}}"
        "{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


CLIP: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
}
LLAVA_PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "patch_size": 7,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
    "image_token": "<image>",
}
# Pictures first, then texts, each followed by a space; it writes no `<s>`.
LLAVA_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
PIXTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST]"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for block in message['content'] %}"
    "{% if block['type'] == 'text' %}{{ block['text'] }}{% elif block['type'] == 'image' %}[IMG]{% endif %}"
    "{% endfor %}{% endif %}[/INST]{% else %}{{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)


class Family(NamedTuple):
    architecture: str
    # The model type in config.json, and the module of its processor in transformers.
    model_type: str
    module: str
    image_token: str
    special: list[str]
    processor: dict[str, Any]
    image_processor: dict[str, Any]
    template: str
    # Further fields of tokenizer_config.json.
    named_tokens: dict[str, Any] = {}  # noqa: RUF012 - never changed
    has_bos: bool = False
    # The token of each embedding, if the template writes a different one for a picture.
    soft_token: str = ""


LLAVA = Family(
    "LlavaForConditionalGeneration", "llava", "llava", "<image>", ["<image>"], LLAVA_PROCESSOR, CLIP, LLAVA_TEMPLATE,
    has_bos=True,
)  # fmt: skip
LLAVA_NEXT = Family(
    "LlavaNextForConditionalGeneration", "llava_next", "llava_next", "<image>", ["<image>"],
    LLAVA_PROCESSOR | {"processor_class": "LlavaNextProcessor"},
    CLIP
    | {
        "image_processor_type": "LlavaNextImageProcessor",
        "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
    },
    LLAVA_TEMPLATE, has_bos=True,
)  # fmt: skip
IDEFICS3 = Family(
    "Idefics3ForConditionalGeneration", "idefics3", "idefics3", "<image>",
    ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    + [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)],
    {"processor_class": "Idefics3Processor", "image_seq_len": 4},
    {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 112},
        "max_image_size": {"longest_edge": 28},
        "resample": 1,
    },
    SMOLVLM_TEMPLATE,
)  # fmt: skip
SMOLVLM = IDEFICS3._replace(
    architecture="SmolVLMForConditionalGeneration",
    model_type="smolvlm",
    module="smolvlm",
    special=[*IDEFICS3.special, "<video>"],
    processor={"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    image_processor=IDEFICS3.image_processor | {"image_processor_type": "SmolVLMImageProcessor"},
)
INTERNVL_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
INTERNVL = Family(
    "InternVLForConditionalGeneration", "internvl", "internvl", "<IMG_CONTEXT>", [*INTERNVL_TOKENS.values()],
    {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    {
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "size": {"height": 28, "width": 28},
        "crop_to_patches": False,
        "min_patches": 1,
        "max_patches": 6,
        "resample": 3,
    },
    say_by_marker("<IMG_CONTEXT>\\n"),
    named_tokens={"extra_special_tokens": INTERNVL_TOKENS},
)  # fmt: skip
PIXTRAL = Family(
    "Mistral3ForConditionalGeneration", "mistral3", "pixtral", "[IMG]", ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
    {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 112}, "patch_size": 14, "resample": 3},
    PIXTRAL_TEMPLATE, has_bos=True,
)  # fmt: skip
# Its template writes a marker for a picture that is not a token.
AYA = Family(
    "AyaVisionForConditionalGeneration", "aya_vision", "aya_vision", "<image>",
    ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>"],
    {"processor_class": "AyaVisionProcessor", "patch_size": 14, "img_size": 28, "image_token": "<image>"},
    INTERNVL.image_processor | {"crop_to_patches": True},
    SMOLVLM_TEMPLATE, soft_token="<|IMG_PATCH|>",
)  # fmt: skip
# Patches as Qwen's; each square of merged patches is a token.
PATCHES = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}, "patch_size": 14, "merge_size": 2}
QWEN2_VL = Family(
    "Qwen2VLForConditionalGeneration", "qwen2_vl", "qwen2_vl", "<|image_pad|>",
    ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>"],
    {"processor_class": "Qwen2VLProcessor"},
    PATCHES | {"image_processor_type": "Qwen2VLImageProcessor"},
    say_by_marker("<|vision_start|><|image_pad|><|vision_end|>"),
)  # fmt: skip
GLM4V = Family(
    "Glm4vForConditionalGeneration", "glm4v", "glm4v", "<|image|>",
    ["<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|im_start|>", "<|im_end|>"],
    {"processor_class": "Glm4vProcessor"},
    PATCHES
    | {
        "image_processor_type": "Glm4vImageProcessor",
        "size": {"shortest_edge": 112 * 112, "longest_edge": 112 * 112 * 2},
    },
    say_by_marker("<|begin_of_image|><|image|><|end_of_image|>"),
)  # fmt: skip
PADDLEOCR_TOKENS = {"image_token": "<|IMAGE_PLACEHOLDER|>"}
PADDLEOCR = Family(
    "PaddleOCRVLForConditionalGeneration", "paddleocr_vl", "paddleocr_vl", "<|IMAGE_PLACEHOLDER|>",
    ["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|im_start|>", "<|im_end|>"],
    {"processor_class": "PaddleOCRVLProcessor"},
    PATCHES | {"image_processor_type": "PaddleOCRVLImageProcessor"},
    say_by_marker("<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"),
    named_tokens={"extra_special_tokens": PADDLEOCR_TOKENS},
)  # fmt: skip
GEMMA4_TOKENS = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
# Its arrays are padded to the most patches, and it makes pictures of any size about as large.
GEMMA4 = Family(
    "Gemma4ForConditionalGeneration", "gemma4", "gemma4", "<|image|>", [*GEMMA4_TOKENS.values(), "<|video|>"],
    {"processor_class": "Gemma4Processor"},
    {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 7,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
    },
    say_by_marker("<|image|>"),
    named_tokens={"extra_special_tokens": GEMMA4_TOKENS},
)  # fmt: skip
FAMILIES = (LLAVA, LLAVA_NEXT, IDEFICS3, SMOLVLM, INTERNVL, PIXTRAL, AYA, QWEN2_VL, GLM4V, PADDLEOCR, GEMMA4)
NUMBERS = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 600, "max_position_embeddings": 8192}


def write_borrowed_checkpoint(directory: Path, family: Family, **changed: dict[str, Any]) -> dict[str, int]:
    """Write a checkpoint; return the ids of added tokens. `changed`: further fields, by file name without suffix."""
    directory.mkdir(exist_ok=True)
    ids = write_tokenizer(directory, family.special, family.named_tokens, has_bos=family.has_bos)
    contents = {
        "config": {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            "text_config": NUMBERS,
            "vision_config": {},
            "image_token_id": ids[family.soft_token or family.image_token],
        },
        "processor_config": family.processor,
        "preprocessor_config": family.image_processor,
    }
    for name, values in contents.items():
        (directory / f"{name}.json").write_text(json.dumps(values | changed.get(name, {})))
    (directory / "chat_template.jinja").write_text(family.template)
    return ids


def write_tokenizer(
    directory: Path, special: list[str], named_tokens: dict[str, Any] | None = None, *, has_bos: bool = False
) -> dict[str, int]:
    """Write a tokenizer; return its ids. With `has_bos` it writes an `<s>` before every text, as Llama's does."""
    ids = write_byte_level_tokenizer(directory, special=[*special, "<s>"])
    path = directory / "tokenizer_config.json"
    # Not a tokenizer class of Qwen's: transformers would rebuild that one.
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"} | (named_tokens or {})
    if has_bos:
        backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        writes_bos: Any = tokenizers.processors.TemplateProcessing
        backend.post_processor = writes_bos(single="<s> $A", special_tokens=[("<s>", ids["<s>"])])
        backend.save(str(directory / "tokenizer.json"))
        config["bos_token"] = "<s>"
    path.write_text(json.dumps(config))
    return ids


def load_reference(directory: Path, family: Family) -> Any:
    """Build the processor by hand: AutoProcessor needs torchvision for those that take films, and for Pixtral's.

    Pixtral's module has to be imported already: see `borrowed_pictures`.
    """
    from transformers import AutoImageProcessor, AutoTokenizer

    read: Any = AutoImageProcessor
    parts = {
        "image_processor": read.from_pretrained(directory, backend="pil"),
        "tokenizer": AutoTokenizer.from_pretrained(directory),
    }
    options = dict(family.processor)
    kind: Any = getattr(
        importlib.import_module(f"transformers.models.{family.module}.processing_{family.module}"),
        options.pop("processor_class"),
    )
    if missing := set(kind.get_attributes()) - parts.keys():
        parts |= dict.fromkeys(missing)
        kind = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    return kind(**parts, **options)
