"""A folder whose files do not fit together is refused, with the names of the files; it never serves garbage.

Upstream: https://github.com/sgl-project/sglang/issues/32279 (a missing shard was dropped and the model served garbage),
https://github.com/Blaizzy/mlx-vlm/issues/1827, https://github.com/Neph0s/CoSER/issues/3,
https://github.com/JustVugg/colibri/issues/586.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from device.cpu import CpuDevice
from device.errors import LoadError
from runtime.loaders.checkpoint import open_checkpoint
from runtime.models.build import build_model
from tests.support.checkpoints import TINY_LLAMA, index_of, tiny_tensors, write_folder, write_index

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "tests" / "data" / "tiny_tokenizer"
SHARD = "model-{:05d}-of-00003.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "tiny", TINY_LLAMA, tiny_tensors(TINY_LLAMA), shards=3)


def refusal(folder: Path) -> str:
    with pytest.raises(LoadError) as caught:
        open_checkpoint(folder, lambda _: None)
    return str(caught.value)


def test_the_whole_folder_loads(folder: Path) -> None:
    notices: list[str] = []
    checkpoint = open_checkpoint(folder, notices.append)
    expected = tiny_tensors(TINY_LLAMA)
    assert set(checkpoint.names()) == set(expected) and not notices
    for name, values in expected.items():
        found = checkpoint.weight(name).q if values.ndim == 2 else checkpoint.vector(name)
        assert found.tolist() == values.tolist()


def test_missing_shards_are_listed(folder: Path) -> None:
    (folder / SHARD.format(2)).unlink()
    message = refusal(folder)
    assert SHARD.format(2) in message and "incomplete download?" in message
    assert SHARD.format(1) not in message
    (folder / SHARD.format(3)).unlink()
    message = refusal(folder)
    assert SHARD.format(2) in message and SHARD.format(3) in message


def test_a_truncated_shard_is_named(folder: Path) -> None:
    shard = folder / SHARD.format(3)
    shard.write_bytes(shard.read_bytes()[:-100])
    message = refusal(folder)
    assert SHARD.format(3) in message and "incomplete download?" in message


def test_an_empty_shard_is_named(folder: Path) -> None:
    (folder / SHARD.format(1)).write_bytes(b"")
    assert SHARD.format(1) in refusal(folder)


def test_a_tensor_of_the_index_that_no_shard_has(folder: Path) -> None:
    write_index(folder, index_of(folder) | {"model.layers.9.mlp.up_proj.weight": SHARD.format(2)})
    message = refusal(folder)
    assert "model.layers.9.mlp.up_proj.weight" in message and SHARD.format(2) in message


def test_a_shard_that_the_index_does_not_name(folder: Path) -> None:
    shutil.copy(folder / SHARD.format(1), folder / "model-00004-of-00004.safetensors")
    assert "model-00004-of-00004.safetensors" in refusal(folder)


def test_a_file_of_another_series_is_left_aside_with_a_notice(folder: Path) -> None:
    """Mistral's folders on the Hub hold the same weights twice, the second time as consolidated.safetensors."""
    shutil.copy(folder / SHARD.format(1), folder / "consolidated.safetensors")
    notices: list[str] = []
    open_checkpoint(folder, notices.append)
    assert len(notices) == 1 and "consolidated.safetensors" in notices[0]


def test_a_tensor_in_two_shards(folder: Path) -> None:
    shutil.copy(folder / SHARD.format(1), folder / SHARD.format(2))
    message = refusal(folder)
    assert SHARD.format(1) in message and SHARD.format(2) in message


def test_an_index_that_looks_in_the_wrong_shard(folder: Path) -> None:
    index = index_of(folder)
    name = next(n for n, s in index.items() if s == SHARD.format(1))
    write_index(folder, index | {name: SHARD.format(2)})
    assert name in refusal(folder)


@pytest.mark.parametrize("path", ["../{}", "/{}", "sub/../../{}", "..\\{}", "C:{}", "..", "."])
def test_a_path_out_of_the_folder_is_refused(folder: Path, path: str) -> None:
    outside = path.format(SHARD.format(1))
    shutil.copy(folder / SHARD.format(1), folder.parent / SHARD.format(1))  # it would load
    index = index_of(folder)
    name = next(iter(index))
    write_index(folder, index | {name: outside})
    message = refusal(folder)
    assert "refused" in message and "model.safetensors.index.json" in message


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refusal(folder)


def test_a_missing_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    message = refusal(folder)
    assert "model.safetensors.index.json" in message and "incomplete download?" in message


def test_a_parameter_without_data_is_named(tmp_path: Path) -> None:
    """The index and its shards may agree and yet lack what the model needs."""
    tensors = tiny_tensors(TINY_LLAMA)
    lost = "model.layers.1.self_attn.k_proj.weight"
    del tensors[lost]
    checkpoint = open_checkpoint(write_folder(tmp_path, TINY_LLAMA, tensors, shards=2), lambda _: None)
    assert checkpoint.missing(tiny_tensors(TINY_LLAMA)) == [lost]
    with pytest.raises(LoadError, match=rf"{lost!r} is missing; incomplete download"):
        checkpoint.weight(lost)


@pytest.mark.parametrize("lost", sorted(tiny_tensors(TINY_LLAMA)))
def test_every_parameter_without_data_stops_the_start(tmp_path: Path, lost: str) -> None:
    """Uninitialised weights give wrong text that looks plausible."""
    tensors = tiny_tensors(TINY_LLAMA)
    del tensors[lost]
    checkpoint = open_checkpoint(write_folder(tmp_path, TINY_LLAMA, tensors, shards=2), lambda _: None)
    with pytest.raises(LoadError) as caught:
        build_model(checkpoint, CpuDevice(), 64)
    assert lost in str(caught.value) and "incomplete download?" in str(caught.value)


# ---------------------------------------------------------------------------------------------- the command


class Started:
    """``jumar serve FOLDER`` in a process of its own, watched until it ends or listens."""

    def __init__(self, folder: Path, port: int) -> None:
        command = [sys.executable, "-m", "server.cli", "serve", str(folder), "--port", str(port)]
        command += ["--device", "cpu", "--tokenizer", str(TOKENIZER)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command, cwd=folder.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.listened = False
        deadline = time.monotonic() + 60
        try:
            while process.poll() is None and not self.listened and time.monotonic() < deadline:
                self.listened = _listens(port)
                time.sleep(0.02)
            if process.poll() is None:
                process.terminate()
            self.output, _ = process.communicate(timeout=30)
        finally:
            process.kill()
        self.code = process.returncode


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


@pytest.fixture
def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_serve_ends_before_the_port_opens_and_lists_the_missing_files(folder: Path, port: int) -> None:
    (folder / SHARD.format(2)).unlink()
    (folder / SHARD.format(3)).unlink()
    started = Started(folder, port)
    assert started.code not in (0, None) and not started.listened
    assert SHARD.format(2) in started.output and SHARD.format(3) in started.output
    assert "incomplete download?" in started.output
    assert "Traceback" not in started.output


def test_serve_ends_before_the_port_opens_where_a_parameter_has_no_data(tmp_path: Path, port: int) -> None:
    tensors = tiny_tensors(TINY_LLAMA | {"vocab_size": 520})
    lost = "model.layers.1.mlp.down_proj.weight"
    del tensors[lost]
    started = Started(write_folder(tmp_path / "tiny", TINY_LLAMA | {"vocab_size": 520}, tensors, shards=2), port)
    assert started.code not in (0, None) and not started.listened
    assert lost in started.output and "Traceback" not in started.output


def test_serve_listens_where_nothing_is_missing(tmp_path: Path, port: int) -> None:
    """The check above would see a port that opens."""
    config = TINY_LLAMA | {"vocab_size": 520}
    started = Started(write_folder(tmp_path / "tiny", config, tiny_tensors(config), shards=3), port)
    assert started.listened and started.code == 0, started.output
