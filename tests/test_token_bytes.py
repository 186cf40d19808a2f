import itertools
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from keepsight.token_bytes import BytesReader, read_token_bytes
from tests.byte_level_tokenizer import byte_level_checkpoint
from tests.frontend.gemma_like import DEMO, gemma_like_checkpoint
from tests.llama_like_tokenizer import llama_like_checkpoint


@pytest.mark.parametrize("directory", [DEMO, gemma_like_checkpoint(), byte_level_checkpoint(), llama_like_checkpoint()])
def test_bytes_decode_as_in_the_library_but_the_characters_beside_a_bad_byte_are_kept(directory: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    token_bytes = read_token_bytes(backend)
    of_bytes = [each for each in range(backend.get_vocab_size()) if token_bytes.is_bytes(each)]
    single = {token_bytes.of(each): each for each in of_bytes if len(token_bytes.of(each)) == 1}
    in_bytes = (st.text(max_size=2).map(str.encode) | st.binary(max_size=2)).map(
        lambda data: [single[bytes([byte])] for byte in data]
    )
    pieces = st.lists(in_bytes | st.sampled_from(of_bytes).map(lambda each: [each]))

    @given(pieces.map(lambda each: [*itertools.chain(*each)]).filter(bool))
    def check(token_ids: list[int]) -> None:
        parts = [*map(token_bytes.of, token_ids)]
        reader = BytesReader()
        text = "".join([*map(reader.push, parts), reader.finish()])
        shown = text.removeprefix(" ") if token_bytes.drops_first_space else text
        judged = backend.decode(token_ids, skip_special_tokens=False)
        assert shown == judged or set(judged) == {"\ufffd"}
        assert text == b"".join(parts).decode(errors="replace")

    check()


def test_the_byte_alphabet_equals_that_of_tokenizers() -> None:
    alphabet = {spelling: place for place, spelling in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    token_bytes = read_token_bytes(backend)
    assert {token_bytes.of(each) for each in alphabet.values()} == {bytes([byte]) for byte in range(256)}
    for character in map(chr, range(0x250)):
        assert b"".join(map(token_bytes.of, backend.encode(character).ids)) == character.encode()


def test_an_unsupported_decoder_is_named_with_the_supported_ones() -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    for decoder, name in ((None, "None"), (decoders.WordPiece(), "WordPiece")):
        backend.decoder = decoder
        with pytest.raises(ValueError, match=rf"\['{name}'\] is not supported, only .*Fuse.* or ByteLevel"):
            read_token_bytes(backend)
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()])
    with pytest.raises(ValueError, match="not supported"):
        read_token_bytes(backend)
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)])
    with pytest.raises(ValueError, match="a Strip is supported only at the end"):
        read_token_bytes(backend)
