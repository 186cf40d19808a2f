"""Computes the keys of pictures' embeddings in tiers, as a server with the same flags names them.

Reads the checkpoint's configuration and, the first time, its weights' bytes; loads no model.
"""

from collections.abc import Mapping

from keepsight.config import Config
from keepsight.engine.plan_tiers import describe_processor, plan_tiers
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prompt.read_messages import PicturePart
from keepsight.runner.load_runner import choose_place, describe_encoder


def name_entries(config: Config, pictures: Mapping[str, bytes]) -> dict[str, list[str]]:
    """Return the keys of each picture: one for the whole and one for each crop; for a PDF, those of its pages.

    Errors refer to a picture by its key in `pictures`.
    """
    preparer = RequestPreparer.from_config(config)
    try:
        media_hashes = {
            name: [each for named in preparer.name_media(PicturePart(content, name), None) for each in named.parts]
            for name, content in pictures.items()
        }
    finally:
        preparer.close()
    assert preparer.processor is not None, "what reads no pictures has refused them"
    encoder = describe_encoder(config, choose_place(config))
    name = plan_tiers(config).namer(describe_processor(preparer.processor), encoder)
    # Without an adapter, an encoder key is the media hash.
    return {picture: [name(media_hash) for media_hash in hashes] for picture, hashes in media_hashes.items()}
