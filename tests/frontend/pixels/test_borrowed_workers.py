"""Workers lay out and prepare a borrowed model's pictures; the frontend needs neither transformers nor torch."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from keepsight.borrowed import BorrowedProcessor
from keepsight.errors import CheckpointConfigError, UnknownArchitectureError
from keepsight.frontend.pixels.make_pixels import BorrowedJob, BorrowedLook
from keepsight.frontend.pixels.media_workers import MediaWorkers
from keepsight.media import Geometry
from tests.frontend.borrowed_like import IDEFICS3, LLAVA_NEXT, QWEN2_VL, write_borrowed_checkpoint
from tests.frontend.sample_pictures import encode, random_picture

ROOT = Path(__file__).parents[3]
FIELD = "messages[0].content[1]"


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> BorrowedProcessor:
    directory = tmp_path_factory.mktemp("idefics3")
    write_borrowed_checkpoint(directory, IDEFICS3)
    return BorrowedProcessor.from_checkpoint(directory)


@pytest.fixture(scope="module")
def workers() -> Iterator[MediaWorkers]:
    with closing(MediaWorkers(1)) as workers:
        yield workers


def test_a_worker_lays_out_and_makes_what_would_be_made_here(
    workers: MediaWorkers, processor: BorrowedProcessor
) -> None:
    for seed, size in enumerate([(401, 311), (40, 300)]):
        layout = workers.look(BorrowedLook(processor, Geometry(*size), FIELD))
        assert layout == BorrowedLook(processor, Geometry(*size), FIELD).run()
        content = encode(random_picture("RGB", size, seed), "PNG")
        job = BorrowedJob(content, FIELD, {"hash": None}, processor, layout)
        np.testing.assert_array_equal(workers.make(job).pixels["hash"], job.run().pixels["hash"])


def test_a_worker_tells_in_how_many_columns_a_picture_s_tokens_are(workers: MediaWorkers, tmp_path: Path) -> None:
    write_borrowed_checkpoint(tmp_path, QWEN2_VL)
    processor, size = BorrowedProcessor.from_checkpoint(tmp_path), Geometry(200, 100)
    layout = workers.look(BorrowedLook(processor, size, FIELD))
    assert layout == BorrowedLook(processor, size, FIELD).run()
    assert 1 < layout.columns < layout.num_tokens


def test_the_template_that_has_loaded_a_processor_has_one_thread(
    workers: MediaWorkers, processor: BorrowedProcessor
) -> None:
    """A process with several threads cannot be forked safely."""
    workers.look(BorrowedLook(processor, Geometry(50, 50), FIELD))
    workers.wait_until_started()
    template = workers.pids()[0]
    assert len([*Path(f"/proc/{template}/task").iterdir()]) == 1
    assert b"/tokenizers/" in Path(f"/proc/{template}/maps").read_bytes()


def test_where_transformers_cannot_be_imported_workers_still_come_and_say_why(
    tmp_path: Path, processor: BorrowedProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise ImportError('of a version that is too old')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    with (
        closing(MediaWorkers(1)) as workers,
        pytest.raises(RuntimeError, match="ImportError: of a version that is too"),
    ):
        workers.look(BorrowedLook(processor, Geometry(50, 50), FIELD))


def test_a_checkpoint_that_cannot_be_used_is_told_as_such(workers: MediaWorkers, tmp_path: Path) -> None:
    broken, unknown = tmp_path / "broken", tmp_path / "unknown"
    write_borrowed_checkpoint(broken, LLAVA_NEXT, processor_config={"processor_class": "NobodysProcessor"})
    write_borrowed_checkpoint(unknown, LLAVA_NEXT, config={"architectures": ["NobodysForConditionalGeneration"]})
    with pytest.raises(CheckpointConfigError, match=r"broken: its own processor cannot be used: .*NobodysProc"):
        workers.look(BorrowedLook(BorrowedProcessor.from_checkpoint(broken), Geometry(50, 50), FIELD))
    with pytest.raises(UnknownArchitectureError, match=r"unknown: architectures: .*Nobodys.*; known are Gemma3"):
        workers.look(BorrowedLook(BorrowedProcessor.from_checkpoint(unknown), Geometry(50, 50), FIELD))


SERVES = """
import sys
from contextlib import closing
from keepsight.config import Config
from keepsight.frontend.pixels.media_workers import MediaWorkers
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.sampling_params import SamplingParams
from tests.drawn import ask, by_url, draw
with closing(MediaWorkers(1)) as workers:
    preparer = RequestPreparer.from_config(Config(model=sys.argv[1]), run_look=workers.look)
    prepared = preparer.prepare_chat(ask(by_url(draw(0).picture), "What?"), SamplingParams())
    prepared.pixels_of(prepared.makeable_media, workers.make)
print({"torch", "transformers"} & set(sys.modules))
"""


def test_a_frontend_whose_workers_know_transformers_and_torch_does_not(processor: BorrowedProcessor) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    ran = subprocess.run(
        [sys.executable, "-c", SERVES, processor.directory], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "set()\n"
