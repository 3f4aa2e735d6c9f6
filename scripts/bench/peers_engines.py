"""The engines that ``peers.py`` measures: how each is installed, in which configurations it runs, and how it is asked.

Everything goes to ``.venvs/peers/`` in the checkout; nothing outside it is touched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".venvs" / "peers"
WORKER = Path(__file__).with_name("peers_worker.py")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
METRICS = {"decode": "tokens/s", "prefill": "tokens/s", "batch16": "tokens/s", "ttft": "s"}


class Missing(Exception):
    """An engine is not installed; the message says what lacks."""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Shown, and its failure ends the installation."""
    print("+", *command, flush=True)
    subprocess.run([str(c) for c in command], cwd=cwd, check=True)


def output(*command: str | Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr[-800:]}")
    return done.stdout


def embedded() -> Path:
    """The GGUF file of the embedded model."""
    sys.path.insert(0, str(ROOT))
    from runtime.loaders.registry import resolve

    return resolve("smollm2-135m")


class Engine(ABC):
    """One engine. configs: names of the configurations it may be run in."""

    name: str
    version: str
    configs: tuple[str, ...]

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.home = HOME / self.name

    def install(self) -> None:
        """From the package index; minutes."""
        return

    def check(self) -> None:
        """Raises Missing."""
        return

    @abstractmethod
    def measure(self, config: str, metric: str) -> float:
        """One run, in the unit of METRICS."""

    def close(self) -> None:
        """End processes that wait for more."""
        return


class WorkerEngine(Engine):
    """An engine with a Python interface, in worker processes that stay: one for each configuration."""

    worker: str

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._running: dict[str, subprocess.Popen[str]] = {}
        self.load_seconds: dict[str, float] = {}

    @property
    def python(self) -> Path:
        return self.home / "env" / "bin" / "python"

    def model(self, config: str) -> Path:
        return self.home / config

    def options(self, config: str) -> list[str]:
        return []

    def check(self) -> None:
        for path in (self.python, *(self.model(c) for c in self.configs)):
            if not path.exists():
                raise Missing(f"{path} is not there")

    def measure(self, config: str, metric: str) -> float:
        process = self._running.get(config) or self._start(config)
        assert process.stdin is not None
        process.stdin.write(metric + "\n")
        process.stdin.flush()
        return float(self._answer(process)["value"])

    def _start(self, config: str) -> subprocess.Popen[str]:
        command = [self.python, WORKER, self.worker, self.model(config), self.threads, *self.options(config)]
        env = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "OMP_PROC_BIND": "true"}
        process = subprocess.Popen(
            [str(c) for c in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=env,
        )  # fmt: skip
        self._running[config] = process
        self.load_seconds[config] = float(self._answer(process)["load"])
        return process

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, float]:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.startswith("{"):  # some print greetings
                found: dict[str, float] = json.loads(line)
                return found
        raise RuntimeError(f"{self.name} ended: {process.stderr.read()[-800:]}")

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()
        self._running.clear()

    def _environment(self, *packages: str) -> None:
        if not self.python.exists():
            run(sys.executable, "-m", "venv", self.home / "env")
        run(self.python, "-m", "pip", "install", "-q", *packages)


class Jumar(WorkerEngine):
    name = worker = "jumar"
    version = "this checkout"
    configs = ("q4_1",)

    @property
    def python(self) -> Path:
        return Path(sys.executable)

    def model(self, config: str) -> Path:
        return embedded()


class LlamaCpp(Engine):
    """llama.cpp, built here with everything this CPU has; the embedded file, and requantised by its own tool."""

    name, version = "llama.cpp", "of llama-cpp-python 0.3.36"
    configs = ("q4_1", "q4_1 fa", "q4_0", "q4_0 fa", "q8_0", "q8_0 fa")
    TARGETS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-perplexity", "llama-server")

    def tool(self, name: str) -> Path:
        return self.home / "build" / "bin" / name

    def model(self, config: str) -> Path:
        kind = config.split()[0]
        return embedded() if kind == "q4_1" else self.home / f"smollm2.{kind}.gguf"

    def install(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        tools = self.home / "env" / "bin"
        if not tools.exists():
            run(sys.executable, "-m", "venv", self.home / "env")
        run(tools / "python", "-m", "pip", "install", "-q", "cmake", "ninja")
        package = "llama-cpp-python==0.3.36"
        if not list(self.home.glob("llama_cpp_python-*.tar.gz")):
            run(
                tools / "python",
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "--no-binary",
                ":all:",
                package,
                cwd=self.home,
            )
        run("tar", "xf", next(self.home.glob("llama_cpp_python-*.tar.gz")), cwd=self.home)
        source = next(self.home.glob("llama_cpp_python-*/vendor/llama.cpp"))
        switches = ("GGML_NATIVE=ON", "LLAMA_CURL=OFF", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF",
                    "LLAMA_BUILD_UI=OFF", "BUILD_SHARED_LIBS=OFF", "CMAKE_BUILD_TYPE=Release")  # fmt: skip
        run(tools / "cmake", "-S", source, "-B", self.home / "build", "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", *(f"-D{s}" for s in switches))  # fmt: skip
        run(tools / "cmake", "--build", self.home / "build", "--target", *self.TARGETS)
        for kind in ("q4_0", "q8_0"):
            run(self.tool("llama-quantize"), "--allow-requantize", embedded(), self.model(kind), kind.upper())

    def check(self) -> None:
        for path in (*map(self.tool, self.TARGETS), *map(self.model, self.configs)):
            if not path.exists():
                raise Missing(f"{path} is not there")

    def measure(self, config: str, metric: str) -> float:
        flash = "1" if config.endswith("fa") else "0"
        model, threads = self.model(config), str(self.threads)
        if metric == "batch16":
            command = [self.tool("llama-batched-bench"), "-m", model, "-t", threads, "-c", "4096", "-b", "2048",
                       "-npp", "128", "-ntg", "64", "-npl", "16", "-fa", "on" if flash == "1" else "off",
                       "--output-format", "jsonl"]  # fmt: skip
            line = next(x for x in output(*command).splitlines() if x.startswith("{"))
            row = json.loads(line)
            assert row["pl"] == 16 and row["tg"] == 64
            return 16 * 64 / float(row["t"])
        sizes = {"decode": ("0", "128", "32"), "prefill": ("512", "0", "0"), "ttft": ("32", "0", "0")}[metric]
        command = [self.tool("llama-bench"), "-m", model, "-t", threads, "-fa", flash, "-r", "1", "-o", "json",
                   "-p", sizes[0], "-n", sizes[1], "-d", sizes[2]]  # fmt: skip
        row = json.loads(output(*command))[0]
        speed = float(row["avg_ts"])
        return 32 / speed if metric == "ttft" else speed


class Export:
    """The embedded model as a float32 Hugging Face folder, for the converters of the other engines."""

    home = HOME / "export"

    @classmethod
    def python(cls) -> Path:
        return cls.home / "env" / "bin" / "python"

    @classmethod
    def folder(cls) -> Path:
        """Made at its first use."""
        folder = cls.home / "smollm2"
        if not cls.python().exists():
            run(sys.executable, "-m", "venv", cls.home / "env")
        if not (folder / "config.json").exists():
            packages = ("torch==2.13.0", "transformers==5.23.0", "gguf", "sentencepiece", "accelerate", "numpy")
            run(cls.python(), "-m", "pip", "install", "-q", *packages)
            run(cls.python(), Path(__file__).with_name("peers_export.py"), embedded(), folder)
        return folder


class OnnxRuntime(WorkerEngine):
    name, worker, version = "onnxruntime-genai", "onnxruntime", "0.18.0"
    configs = ("int4",)

    def install(self) -> None:
        folder = Export.folder()
        run(Export.python(), "-m", "pip", "install", "-q", "onnxruntime-genai==0.18.0", "onnx", "onnx-ir")
        self._environment("onnxruntime-genai==0.18.0", "numpy")
        if not self.model("int4").exists():
            run(Export.python(), "-m", "onnxruntime_genai.models.builder", "-i", folder, "-o", self.model("int4"),
                "-p", "int4", "-e", "cpu", "-c", self.home / "cache")  # fmt: skip


class OpenVino(WorkerEngine):
    name, worker, version = "openvino-genai", "openvino", "2026.4.1.0"
    configs = ("int4", "int8")

    def install(self) -> None:
        folder = Export.folder()
        self._environment("openvino-genai==2026.4.1.0", "torch==2.13.0", "optimum-intel[openvino]==2.2.0", "numpy")
        # it comes with the exporter, made for another build of torch, and keeps transformers from being imported
        run(self.python, "-m", "pip", "uninstall", "-q", "-y", "torchvision")
        for config in self.configs:
            if not self.model(config).exists():
                # 576 columns are no multiple of its default group of 128
                group = ("--group-size", "64") if config == "int4" else ()
                run(self.python.with_name("optimum-cli"), "export", "openvino", "-m", folder, "--task",
                    "text-generation-with-past", "--weight-format", config, *group, self.model(config))  # fmt: skip


class CTranslate2(WorkerEngine):
    name, worker, version = "ctranslate2", "ctranslate2", "4.8.5"
    configs = ("int8", "int8_float32")

    def model(self, config: str) -> Path:
        return self.home / "int8"

    def options(self, config: str) -> list[str]:
        return [f"type={config}"]

    def install(self) -> None:
        folder = Export.folder()
        self._environment("ctranslate2==4.8.5", "torch==2.13.0", "transformers==5.23.0", "numpy")
        if not self.model("int8").exists():
            run(self.python.with_name("ct2-transformers-converter"), "--model", folder, "--output_dir",
                self.model("int8"), "--quantization", "int8")  # fmt: skip


PEERS: tuple[type[Engine], ...] = (LlamaCpp, OnnxRuntime, OpenVino, CTranslate2)
