"""An engine reads its own settings, respects its container's limits, and is ready only when everything is loaded."""

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch

from keepsight.config import Config
from keepsight.demo import checkpoint_path
from keepsight.engine import load_engine, machine_part
from keepsight.engine.load_engine import load_engine_alone
from keepsight.engine.resolve_config import Machine
from keepsight.errors import CheckpointError, ModelTooLargeError, PagesTooLargeError
from keepsight.runner import load_runner
from keepsight.runner.model_runner import ModelRunner
from keepsight.runner.openmp_team import keeping_team_size, set_team_size
from keepsight.runner.share_device import CpuShare
from keepsight.structured_outputs import StructuredOutputsParams
from tests.place import placed


def test_an_engine_normalizes_as_its_options_say() -> None:
    engine = load_engine_alone(Config(**placed(mm_processor_kwargs={"image_mean": 0.25, "image_std": 0.5})))
    try:
        assert isinstance(engine.runner, ModelRunner)
        assert engine.runner.normalizer is not None
        black = engine.runner.normalizer(torch.zeros(1, 1, 1, 3, dtype=torch.uint8))
        torch.testing.assert_close(black.float(), torch.full_like(black.float(), -0.5))
    finally:
        engine.runner.close()


@pytest.mark.parametrize(("least_to_share", "num_threads"), [(0, 2), (load_runner.MIN_PARAMETERS_TO_SHARE, 1)])
def test_an_engine_has_one_thread_per_core_or_one_for_the_demo_and_leaves_the_caller_s(
    least_to_share: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_part, "count_cores", lambda: 2)
    monkeypatch.setattr(load_runner, "MIN_PARAMETERS_TO_SHARE", least_to_share)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with keeping_team_size():
        set_team_size(7)
        engine = load_engine_alone(Config(device="cpu"))
        engine.runner.close()
        assert torch.get_num_threads() == 7
    assert isinstance(engine.runner, ModelRunner)
    assert isinstance(engine.runner._share, CpuShare)
    assert engine.runner._share.all == num_threads


def test_the_vocabulary_is_read_before_the_first_guided_answer(tmp_path: Path) -> None:
    """Reading it then would keep every stream waiting."""
    folder = shutil.copytree(checkpoint_path(), tmp_path / "demo")
    engine = load_engine_alone(Config(**placed(model=str(folder))))
    try:
        (folder / "tokenizer.json").unlink()
        assert isinstance(engine.runner, ModelRunner)
        guide = engine.runner._guides.begin(StructuredOutputsParams(choice=["yes"]))
        assert guide.mask() is not None
    finally:
        engine.runner.close()


def test_a_model_larger_than_what_is_left_of_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = Machine(device="cpu", total_bytes=2**30, available_bytes=2**20, available_host_bytes=2**20)
    monkeypatch.setattr(load_engine, "measure_machine", lambda device: full)
    with pytest.raises(ModelTooLargeError, match=r"0\.0 GiB of memory are left"):
        load_engine_alone(Config(device="cpu"))


def test_a_device_without_room_for_a_model_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")

    monkeypatch.setattr(load_runner, "load_model", refuse)
    with pytest.raises(CheckpointError, match=r"does not fit into the device's memory: CUDA out of memory\. Tried"):
        load_engine_alone(Config(device="cpu"))


def test_a_weight_that_no_memory_could_hold_is_reported_in_one_line(tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint_path(), tmp_path / "demo")
    fields = json.loads((folder / "config.json").read_text())
    fields["text_config"]["vocab_size"] = 10**15
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(
        CheckpointError, match=r"demo: does not fit into the device's memory: .*can't allocate memory.*$"
    ):
        load_engine_alone(Config(device="cpu", model=str(folder)))


@pytest.mark.parametrize("num_blocks", [10**12, 10**18])
def test_blocks_that_no_memory_could_hold_are_refused_with_their_size(num_blocks: int) -> None:
    with pytest.raises(PagesTooLargeError, match=rf"^{num_blocks} KV blocks take \d+\.\d GiB"):
        load_engine_alone(Config(device="cpu", num_gpu_blocks_override=num_blocks))


def test_an_engine_that_cannot_be_loaded_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(load_engine, "load_runner", refuse)
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="Cannot allocate memory"):
        load_engine_alone(Config(**placed(encoder_disk_cache=str(tmp_path))))
    assert not [thread for thread in set(threading.enumerate()) - before if "tier" in thread.name]
