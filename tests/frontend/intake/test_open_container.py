"""Decoders have one thread; what opening refuses is tested with `read_film` and `read_sound`."""

from keepsight.frontend.intake.open_container import open_container, prepare_decoder
from tests.frontend.sample_films import film
from tests.frontend.sample_sounds import sound


def test_the_decoder_of_a_film_or_a_sound_has_one_thread() -> None:
    samples = (
        ("film", film("mp4", "mpeg4"), "mov", "mpeg4"),
        ("sound", sound("flac", "flac", rate=16_000), "flac", "flac"),
    )
    for kind, data, format_, codec in samples:
        with open_container(data, format_, [codec], "field", kind) as container:
            stream = (container.streams.video or container.streams.audio)[0]
            prepare_decoder(stream, [codec], "field", kind)
            assert stream.codec_context.thread_count == 1, kind
