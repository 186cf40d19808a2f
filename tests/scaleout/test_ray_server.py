"""What a server that Ray starts is told by its environment."""

import pytest

pytest.importorskip("ray", reason="the extra 'ray' is not installed")

from keepsight.scaleout.ray_server import RayServer


def test_a_server_knows_neither_the_number_of_reserved_cores_nor_the_router_s_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("KEEPSIGHT_SSL_KEYFILE_PASSWORD", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    environment = RayServer([], {"KEEPSIGHT_API_KEY": "key"})._environment
    assert not {"OMP_NUM_THREADS", "KEEPSIGHT_SSL_KEYFILE_PASSWORD"} & environment.keys()
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["KEEPSIGHT_API_KEY"]) == ("3", "key")
    assert RayServer([], {"OMP_NUM_THREADS": "2"})._environment["OMP_NUM_THREADS"] == "2"
