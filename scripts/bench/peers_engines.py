"""The engines that ``peers.py`` measures: how each is installed, in which configurations it runs, and how it is asked.

Everything goes to ``.venvs/peers/`` in the checkout; nothing outside it is touched.
"""

from __future__ import annotations

import json
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from runtime.loaders.gguf import GGUFFile  # noqa: E402
from runtime.loaders.registry import resolve  # noqa: E402
from scripts.bench.peers_process import LlamaServer, Worker  # noqa: E402

HOME = ROOT / ".venvs" / "peers"
WORKER = Path(__file__).with_name("peers_worker.py")
RATE = "tokens/s"  # more of it is better; of all other units less is
METRICS = {"decode": RATE, "prefill": RATE, "batch16": RATE, "ttft": "ms", "load": "s", "memory": "MiB"}


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

    def token_bytes(self, config: str) -> int | None:
        """Bytes of weights that are read for a token, where they are known."""
        return None

    def close(self) -> None:
        """End processes that wait for more."""
        return


class WorkerEngine(Engine):
    """An engine with a Python interface, in worker processes that stay: one for each configuration."""

    worker: str

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._running: dict[str, Worker] = {}

    @property
    def python(self) -> Path:
        return self.home / "env" / "bin" / "python"

    def model(self, config: str) -> Path:
        return self.home / config

    def kind(self, config: str) -> str:
        """The worker's name for it."""
        return self.worker

    def options(self, config: str) -> list[str]:
        return []

    def check(self) -> None:
        for path in (self.python, *(self.model(c) for c in self.configs)):
            if not path.exists():
                raise Missing(f"{path} is not there")

    def measure(self, config: str, metric: str) -> float:
        if metric in ("load", "memory"):
            worker = self._start(config)  # one that did nothing before
            try:
                if metric == "load":
                    return worker.load_seconds
                worker.ask("batch16")
                return worker.peak_memory()
            finally:
                worker.close()
        if config not in self._running:
            self._running[config] = self._start(config)
        return self._running[config].ask(metric)

    def _start(self, config: str) -> Worker:
        command = [self.python, WORKER, self.kind(config), self.model(config), str(self.threads), *self.options(config)]
        return Worker(self.name, command, self.threads)

    def close(self) -> None:
        for worker in self._running.values():
            worker.close()
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
            fetch = ("pip", "download", "-q", "--no-deps", "--no-binary", ":all:", package)
            run(tools / "python", "-m", *fetch, cwd=self.home)
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

    def token_bytes(self, config: str) -> int:
        """The table of embeddings is the head too."""
        return sum(tensor.nbytes for tensor in GGUFFile(self.model(config)).tensors.values())

    def measure(self, config: str, metric: str) -> float:
        flash = "1" if config.endswith("fa") else "0"
        if metric in ("load", "memory"):
            return self._serve(config, flash, metric)
        model, threads = self.model(config), str(self.threads)
        if metric == "batch16":
            command = [self.tool("llama-batched-bench"), "-m", model, "-t", threads, "-c", "4096", "-ub", "2048",
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
        return 1000 * 32 / speed if metric == "ttft" else speed

    def _serve(self, config: str, flash: str, metric: str) -> float:
        # as lean as it can be: no warming up, no cache of old prompts
        command = [self.tool("llama-server"), "-m", self.model(config), "-t", str(self.threads), "-fa", flash,
                   "-c", "4096", "-np", "16", "--no-warmup", "--cache-ram", "0"]  # fmt: skip
        server = LlamaServer(command, self.threads)
        try:
            if metric == "load":
                return server.load_seconds
            server.run(16, 128, 64)
            return server.peak_memory()
        finally:
            server.close()


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
    configs = ("int4", "int8", "int4 plain", "int8 plain")

    def kind(self, config: str) -> str:
        return "openvino-plain" if config.endswith("plain") else "openvino"

    def model(self, config: str) -> Path:
        return self.home / config.split()[0]

    def install(self) -> None:
        folder = Export.folder()
        self._environment("openvino-genai==2026.4.1.0", "torch==2.13.0", "optimum-intel[openvino]==2.2.0", "numpy")
        # it comes with the exporter, made for another build of torch, and keeps transformers from being imported
        run(self.python, "-m", "pip", "uninstall", "-q", "-y", "torchvision")
        for config in ("int4", "int8"):
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
