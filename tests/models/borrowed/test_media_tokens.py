"""The tokens of media, under the names that configurations have for them."""

from types import SimpleNamespace

from keepsight.models.borrowed.media_tokens import find_media_token, find_media_tokens


def test_a_token_is_found_under_either_name_unless_it_is_null() -> None:
    config = SimpleNamespace(image_token_id=None, image_token_index=7, video_token_id=8, audio_token_id=None)
    assert find_media_token(config, "image") == 7
    assert find_media_token(config, "audio") is None
    assert find_media_tokens(config) == {7, 8}
