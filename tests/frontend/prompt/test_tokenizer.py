import json
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from keepsight.errors import CheckpointConfigError, InvalidArgumentError
from keepsight.frontend.prompt import tokenizer as tokenizer_module
from keepsight.frontend.prompt.tokenizer import PIECE_CHARACTERS, Tokenizer
from tests.byte_level_tokenizer import byte_level_checkpoint, write_byte_level_tokenizer
from tests.frontend.adding_tokenizer import make_tokenizer_add
from tests.frontend.gemma_like import DEMO, gemma_like_checkpoint, load_processor
from tests.llama_like_tokenizer import llama_like_checkpoint

CHECKPOINTS = (DEMO, gemma_like_checkpoint())
JUDGED = (*CHECKPOINTS, byte_level_checkpoint(), llama_like_checkpoint())
JUDGED_NAMES = ["demo", "gemma-like", "byte-level", "llama-like"]
FRAGMENTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["\n", "\n\n", "  ", "\t", "<eos>", "<bos>", "<end_of_turn>", "<start_of_image>", "<table>", "é", "😀"]
    ),
    st.sampled_from(["the picture", "<", "<0xE2>", "▁", "[multimodal]", "<image_soft_token>", "\x00", "\u2028"]),
    st.sampled_from(["<|im_start|>", "<|im_end|>", "<think>", "ßß", "日 本", "e\u0301", "\u0338", "it's 2024"]),
)
END = "<end_of_turn>"
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)


@pytest.fixture(params=CHECKPOINTS, ids=["demo", "gemma-like"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.mark.parametrize("directory", JUDGED, ids=JUDGED_NAMES)
def test_token_ids_and_texts_are_those_of_transformers(directory: Path) -> None:
    ours, judge = Tokenizer.from_checkpoint(directory), load_judge(directory)

    @settings(max_examples=150)
    @given(TEXTS)
    def check(text: str) -> None:
        assert list(ours.encode(text)) == judge.encode(text, add_special_tokens=False)
        assert list(ours.encode(text, add_bos=True)) == judge.encode(text)
        for skip in (True, False):
            token_ids = ours.encode(text)
            assert ours.decode(token_ids, skip) == judge.decode(token_ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("token", ["<think>", "</tool_call>", "[INST]", "<｜User｜>", "<eos>"])
def test_added_tokens_between_signs_give_structure_like_special_ones(tmp_path: Path, token: str) -> None:
    assert token in tokenizer_with_added(tmp_path, token).structure


@pytest.mark.parametrize("token", ["covid", "\n\n\n", "  ", "▁▁", "->", "...", " <b> ", "x>", "<x"])
def test_words_signs_and_spaces_that_were_added_give_none(tmp_path: Path, token: str) -> None:
    assert token not in tokenizer_with_added(tmp_path, token).structure


def tokenizer_with_added(directory: Path, token: str) -> Tokenizer:
    """Return a tokenizer with a further token, which is not special."""
    write_byte_level_tokenizer(directory)
    path = directory / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.add_tokens([tokenizers.AddedToken(token, special=False)])
    backend.save(str(path))
    return Tokenizer.from_checkpoint(directory)


@pytest.mark.parametrize("directory", JUDGED, ids=JUDGED_NAMES)
def test_random_token_ids_decode_as_in_transformers_but_the_characters_beside_a_bad_byte_are_kept(
    directory: Path,
) -> None:
    ours, judge = Tokenizer.from_checkpoint(directory), load_judge(directory)

    all_bytes = map(ours.token_bytes, range(ours.num_tokens))
    in_bytes = st.sampled_from(
        [each for each, data in enumerate(all_bytes) if len(data) == 1 and data in "aé😀".encode()]
    )

    @settings(max_examples=100)
    @given(st.lists(st.integers(0, ours.num_tokens + 20) | in_bytes, max_size=20), st.booleans())
    def check(token_ids: list[int], skip: bool) -> None:
        expected = judge.decode(token_ids, skip_special_tokens=skip)
        if "\ufffd" in expected:
            shown = [each for each in token_ids if not (skip and ours.is_special(each))]
            expected = b"".join(map(ours.token_bytes, shown)).decode(errors="replace")
            expected = expected.removeprefix(" ") if ours.drops_first_space else expected
        assert ours.decode(token_ids, skip) == expected
        assert "".join(ours.decode_each(token_ids, skip)) == expected

    check()


def test_a_first_space_in_a_byte_is_dropped() -> None:
    ours, judge = Tokenizer.from_checkpoint(llama_like_checkpoint()), load_judge(llama_like_checkpoint())
    token_ids = judge.convert_tokens_to_ids(["<0x20>", "<0x61>"])
    assert "".join(ours.decode_each(token_ids)) == judge.decode(token_ids) == ours.decode(token_ids)


@pytest.mark.parametrize("directory", JUDGED, ids=JUDGED_NAMES)
def test_the_special_tokens_are_those_of_transformers(directory: Path) -> None:
    ours, judge = Tokenizer.from_checkpoint(directory), load_judge(directory)
    assert judge.special_tokens_map.items() <= ours.special_tokens.items()
    assert ours.bos_token_id == judge.bos_token_id
    assert ours.num_tokens == len(judge)
    assert {token_id for token_id in range(ours.num_tokens) if ours.is_special(token_id)} == set(
        judge.all_special_ids
    ) | {token_id for token_id, token in judge.added_tokens_decoder.items() if token.special}


def test_the_ends_of_an_answer_come_from_the_generation_config() -> None:
    assert Tokenizer.from_checkpoint(DEMO).eos_token_ids == {1, 6}
    gemma_like = Tokenizer.from_checkpoint(gemma_like_checkpoint())
    assert gemma_like.eos_token_ids == {1, gemma_like.token_id("<end_of_turn>")}
    byte_level = Tokenizer.from_checkpoint(byte_level_checkpoint())
    assert byte_level.eos_token_ids == {byte_level.token_id("<|im_end|>"), byte_level.token_id("<|endoftext|>")}


def test_without_a_generation_config_the_next_file_names_the_ends(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    for expected, change in [({5}, {"eos_token_id": 5}), ({1}, {"eos_token_id": None}), ({1}, {"text_config": {}})]:
        config |= change
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert Tokenizer.from_checkpoint(tmp_path).eos_token_ids == expected


def test_a_tokenizer_s_own_end_that_ends_no_answer_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers' generate() continues after it, too, but other servers stop, so it is worth a log line."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    Tokenizer.from_checkpoint(tmp_path)
    assert not caplog.text
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 6}))
    assert Tokenizer.from_checkpoint(tmp_path).eos_token_ids == {6}
    assert "eos_token <eos> (1) does not end answers" in caplog.text


def test_byte_tokens_give_their_byte_and_others_their_text() -> None:
    tokenizer = Tokenizer.from_checkpoint(DEMO)
    token_id = tokenizer.token_id("<0xE2>")
    assert token_id is not None
    assert tokenizer.token_bytes(token_id) == b"\xe2"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("a café 😀\n<eos>"))) == "a café 😀\n<eos>".encode()


def test_where_all_tokens_are_bytes_they_give_them_and_added_ones_their_text() -> None:
    tokenizer = Tokenizer.from_checkpoint(byte_level_checkpoint())
    text = "<|im_start|>a café 😀\n<think>日 本</think>東"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(tokenizer.num_tokens) == b""


def test_a_byte_level_tokenizer_of_another_shape_is_read_as_by_transformers(tmp_path: Path) -> None:
    """As Llama 3's: text is not normalized, and `<|begin_of_text|>` comes first."""
    bos = write_byte_level_tokenizer(tmp_path)["<|im_start|>"]
    processors = tokenizers.processors
    template = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)])
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    backend.normalizer = None
    backend.save(str(tmp_path / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>"}
    _edit(tmp_path / "tokenizer_config.json", lambda config: config.update(names, clean_up_tokenization_spaces=True))
    expect_as_by_transformers(tmp_path, "it 's e\u0301 <|im_end|>a , b ?")
    ours, judge = Tokenizer.from_checkpoint(tmp_path), load_judge(tmp_path)
    assert list(ours.encode("a é", add_bos=True)) == judge.encode("a é")


@pytest.mark.parametrize("is_back", [False, True])
def test_others_run_while_a_long_text_is_encoded_or_decoded(is_back: bool) -> None:
    tokenizer, has_begun, is_done = Tokenizer.from_checkpoint(DEMO), threading.Event(), threading.Event()
    text = "😀é東 hello " * 40_000
    work = partial(tokenizer.decode, tokenizer.encode(text)) if is_back else partial(tokenizer.encode, text)

    def run() -> None:
        has_begun.set()
        work()
        is_done.set()

    thread = threading.Thread(target=run)
    thread.start()
    has_begun.wait()
    num_turns = 0
    while not is_done.wait(0.001):
        num_turns += 1
    thread.join()
    assert num_turns > 10


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="UTF-8"):
        Tokenizer.from_checkpoint(DEMO).encode("a\ud800")


def test_ids_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="token_ids"):
        Tokenizer.from_checkpoint(DEMO).decode([-1])


def test_a_token_that_eats_white_space_is_no_boundary(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))

    def eat(written: dict[str, Any]) -> None:
        written["added_tokens"][1]["rstrip"] = True  # <eos>
        extra = {"special": False, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
        written["added_tokens"].append({"id": 910, "content": "x<end_of", **extra})

    _edit(tmp_path / "tokenizer.json", eat)
    _edit(tmp_path / "tokenizer_config.json", lambda config: config.pop("added_tokens_decoder"))
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    assert not tokenizer.is_boundary("<eos>")
    assert not tokenizer.is_boundary("<end_of_turn>")
    assert not tokenizer.is_boundary("<nowhere>")
    assert tokenizer.is_boundary("<bos>")


def test_a_token_that_is_found_in_composed_text_only_is_no_boundary(tmp_path: Path) -> None:
    """A combining mark after it may compose with its last character."""
    write_byte_level_tokenizer(tmp_path)
    added = {str(place): {"content": text, "normalized": True} for place, text in enumerate(("<new>", "[named"), 900)}
    _edit(tmp_path / "tokenizer_config.json", lambda config: config["added_tokens_decoder"].update(added))
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    assert tokenizer.is_boundary("<|im_start|>")
    assert tokenizer.is_boundary("<think>")
    for text, mark in (("<new>", "\u0338"), ("[named", "\u0307")):
        assert tokenizer.token_id(text) in tokenizer.encode(text)
        assert tokenizer.token_id(text) not in tokenizer.encode(text + mark)
        assert not tokenizer.is_boundary(text)


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    written = json.loads(path.read_text())
    change(written)
    path.write_text(json.dumps(written))


@pytest.mark.parametrize(
    "fields",
    [
        {"added_tokens_decoder": {"2000": {"content": "<new>", "rstrip": True, "special": True}}},
        {"added_tokens_decoder": {"2000": {"content": "<new>", "special": False}}, "new_token": "<new>"},
        {"eot_token": END, "extra_special_tokens": {"new_token": "<new>"}},
        {"extra_special_tokens": ["<new>", END, "<eos>"]},
        {"additional_special_tokens": [END, "<new>"], "eot_token": END, "extra_special_tokens": None},
        {"additional_special_tokens": [END, "<new>"], "eot_token": END},
    ],
)
def test_a_token_that_only_the_configuration_knows_is_read_as_by_transformers(
    tmp_path: Path, checkpoint: Path, fields: dict[str, Any]
) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))

    def forget(written: dict[str, Any]) -> None:
        """Remove END from the added tokens; the vocabulary still has it."""
        written["added_tokens"] = [each for each in written["added_tokens"] if each["content"] != END]

    def tell(config: dict[str, Any]) -> None:
        described = config.pop("added_tokens_decoder")
        config |= fields
        if "added_tokens_decoder" in fields:
            config["added_tokens_decoder"] = described | fields["added_tokens_decoder"]
        if config["extra_special_tokens"] is None:
            del config["extra_special_tokens"]

    _edit(tmp_path / "tokenizer.json", forget)
    _edit(tmp_path / "tokenizer_config.json", tell)
    expect_as_by_transformers(tmp_path, f"a{END}\n<new>  b<eos>")


def load_judge(folder: Path) -> Any:
    from transformers import AutoTokenizer

    from_pretrained: Any = AutoTokenizer.from_pretrained
    return from_pretrained(folder)


def expect_as_by_transformers(folder: Path, text: str) -> None:
    ours, judge = Tokenizer.from_checkpoint(folder), load_judge(folder)
    assert list(ours.encode(text)) == judge.encode(text, add_special_tokens=False)
    assert ours.num_tokens == len(judge)
    for skip in (True, False):
        assert ours.decode(ours.encode(text), skip) == judge.decode(ours.encode(text), skip_special_tokens=skip)


@pytest.mark.parametrize(
    "fields",
    [
        {"added_tokens_decoder": {"910": {"content": "<tool>", "special": True, "normalized": False}}},
        {"added_tokens_decoder": {"910": {"content": "<tool>", "lstrip": True, "rstrip": True, "normalized": False}}},
        {"extra_special_tokens": {"tool_token": "<tool>"}},
        {"added_tokens_decoder": {}, "additional_special_tokens": ["<tool>"]},
    ],
)
def test_of_a_token_that_both_files_know_the_configuration_says_what_it_is(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    plain = {"special": False, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}

    def tell(config: dict[str, Any]) -> None:
        described = config.pop("added_tokens_decoder")
        config |= fields
        if "added_tokens_decoder" in fields:
            config["added_tokens_decoder"] = described | fields["added_tokens_decoder"]

    _edit(
        tmp_path / "tokenizer.json",
        lambda written: written["added_tokens"].append({"id": 910, "content": "<tool>", **plain}),
    )
    _edit(tmp_path / "tokenizer_config.json", tell)
    expect_as_by_transformers(tmp_path, "foo<tool>bar <tool> baz")


@pytest.mark.parametrize(
    "added", ["$A", "<bos> $A", "$A <eos>", "<bos> $A <eos>", "<eos> <bos> $A", "<eos> $A <bos> <eos>"]
)
def test_the_post_processor_decides_what_is_added_to_a_plain_prompt(tmp_path: Path, added: str) -> None:
    copy_demo_that_adds(added, tmp_path)
    judge = load_processor(tmp_path).tokenizer
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    for text in ("a", "", "Hello there", "<eos>"):
        assert list(tokenizer.encode(text, add_bos=True, add_eos=True)) == judge.encode(text)
        begun = tokenizer.encode(text, add_bos=True)
        assert [*begun, *tokenizer.encode("", add_eos=True)] == judge.encode(text)
        assert begun[len(tokenizer.encode("", add_bos=True)) :] == tokenizer.encode(text)


@pytest.mark.parametrize("added", ["<bos> $A", "$A <eos>", "<bos> $A <eos>"])
def test_a_vocabulary_without_small_letters_adds_its_tokens_too(tmp_path: Path, added: str) -> None:
    copy_demo_that_adds("$A", tmp_path)
    vocabulary = {letter: number for number, letter in enumerate("ACDEFGHIKLMNPQRSTVWY")}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.add_special_tokens(["<bos>", "<eos>", "<end_of_turn>"])
    backend.decoder = tokenizers.decoders.Fuse()
    backend.save(str(tmp_path / "tokenizer.json"))
    make_tokenizer_add(tmp_path, added)
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    judge = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert list(tokenizer.encode("MKV", add_bos=True, add_eos=True)) == judge.encode("MKV").ids


def copy_demo_that_adds(added: str, directory: Path) -> None:
    shutil.copytree(DEMO, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    make_tokenizer_add(directory, added)


def test_a_text_that_has_the_tokens_before_it_lacks_none(tmp_path: Path) -> None:
    copy_demo_that_adds("<eos> <end_of_turn> $A", tmp_path)
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    assert not tokenizer.lacks_bos("<eos><end_of_turn>Hello")
    assert not tokenizer.lacks_bos("<bos>Hello")
    assert tokenizer.lacks_bos("<eos>Hello")


def test_a_post_processor_that_changes_the_text_itself_is_refused(tmp_path: Path) -> None:
    copy_demo_that_adds("$A <eos> $A", tmp_path)
    with pytest.raises(
        CheckpointConfigError, match=r"post_processor: turns .*; only tokens before and after a text are"
    ):
        Tokenizer.from_checkpoint(tmp_path)


WITHOUT_DECODER = '{"version": "1.0", "model": {"type": "BPE", "vocab": {"<bos>": 0, "<eos>": 1}, "merges": []}}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "is missing"),
        ("tokenizer.json", "{", "cannot be read as a tokenizer"),
        ("tokenizer.json", WITHOUT_DECODER, "decoder"),
        ("tokenizer_config.json", "[]", "JSON object"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", '{"eos_token": "<nowhere>"}', "eos_token"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"a": {}}}', "added_tokens_decoder"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [5]}', "added_tokens_decoder"),
        ("generation_config.json", '{"eos_token_id": [1, "x"]}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": true}', "eos_token_id"),
    ],
)
def test_a_broken_file_is_named_with_its_field(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    path = tmp_path / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(CheckpointConfigError, match=message) as caught:
        Tokenizer.from_checkpoint(tmp_path)
    assert caught.value.path == path


@pytest.mark.parametrize("word", ["the cat ", "\n", "é", "background", "<end_of_turn>"])
def test_only_a_text_that_has_far_more_tokens_is_far_too_long(
    word: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "MANY_CHARACTERS", 0)
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    text = word * (3 * PIECE_CHARACTERS // len(word))
    num_tokens = len(tokenizer.encode(text))
    assert not tokenizer.is_far_too_long(text, num_tokens)
    assert tokenizer.is_far_too_long(text, num_tokens // 2 - 1)
