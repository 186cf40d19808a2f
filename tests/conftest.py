"""Fixtures and settings for all tests.

One thread per test process: small models gain nothing from more, and parallel test processes lose much.
"""

import gc
import os
import signal
import socket
import warnings
from collections.abc import Callable, Generator, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Must be imported before torch, which most tests import first: waiting threads then yield to other test processes.
import keepsight  # noqa: F401

# No deadline: how long an example takes depends on how busy the machine is.
settings.register_profile("untimed", deadline=None, max_examples=50)
settings.load_profile("untimed")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
# Read when Triton is first imported. If torch would see no GPU, Triton kernels are interpreted.
hides_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or "+cpu" in version("torch")
if hides_gpus or not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
warnings.filterwarnings("ignore", message=".*torchvision.*")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze objects created by imports, so that later garbage collections need not traverse them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def set_default_dtype() -> Iterator[Callable[[str], None]]:
    """Set torch's default dtype until the test ends, as another program in the same process might."""
    import torch

    yield lambda name: torch.set_default_dtype(getattr(torch, name))
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def without_a_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find no host under .invalid without asking this machine's resolver, which may be slow or answer for any name."""
    resolve = socket.getaddrinfo

    def find(host: Any, *args: Any, **options: Any) -> Any:
        if str(host).endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", find)


@pytest.fixture(scope="session")
def server_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a real server that also accepts embeddings, shared by tests that do not mind other requests."""
    from tests.real_server import END_SECONDS, serving

    log = tmp_path_factory.mktemp("server") / "log"
    with serving(log, "--enable-mm-embeds", "--enable-prompt-embeds") as (process, port):
        yield port
        process.send_signal(signal.SIGINT)
        assert process.wait(END_SECONDS) == 130
    # Refused requests, disconnected clients and shutdown must not log tracebacks.
    assert "Traceback" not in log.read_text()
