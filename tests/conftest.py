"""What all tests share.

One thread per test process: small models gain nothing from more, and parallel test processes lose much.
"""

import gc
import os
import signal
import warnings
from collections.abc import Callable, Generator, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch, which most tests import first: threads that wait for each other leave the cores to other test processes.
import keepsight  # noqa: F401

# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None, max_examples=50)
settings.load_profile("untimed")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
# Read when Triton is imported, by whomever: where torch would see no GPU, its kernels are interpreted.
hides_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or "+cpu" in version("torch")
if hides_gpus or not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
warnings.filterwarnings("ignore", message=".*torchvision.*")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported here stays till the end: whoever looks for garbage need not look through it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def set_default_dtype() -> Iterator[Callable[[str], None]]:
    """As a program may that computes in the same process; until the test ends."""
    import torch

    yield lambda name: torch.set_default_dtype(getattr(torch, name))
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def server_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a real server that takes embeddings too, for all whom it does not matter what others ask it."""
    from tests.real_server import END_SECONDS, serving

    log = tmp_path_factory.mktemp("server") / "log"
    with serving(log, "--enable-mm-embeds", "--enable-prompt-embeds") as (process, port):
        yield port
        process.send_signal(signal.SIGINT)
        assert process.wait(END_SECONDS) == 130
    # Neither refused requests nor clients that left nor the end are failures.
    assert "Traceback" not in log.read_text()
