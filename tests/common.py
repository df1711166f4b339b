"""The same tests run on ``tape`` everywhere and on ``cuda`` where there is a GPU; both poison arenas at release."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import speed  # noqa: F401
import torch
from support import twice
from torch._inductor.runtime.cache_dir_utils import cache_dir

from thunder_cg import cudagraph_transform
from thunder_cg.runtime.cuda import pool

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms ask for it before CUDA starts

# Inductor times a few ways to run a kernel and keeps the fastest on disk. Were that another process's by the time that
# a model's twin is compiled, their sums would differ in the last bit.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache_dir()}/{os.environ.get('PYTEST_XDIST_WORKER', 'tests')}"


@pytest.fixture(params=["tape", *(["cuda"] if torch.cuda.is_available() else [])])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def device(backend: str) -> str:
    return "cuda" if backend == "cuda" else "cpu"


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported stays. Frozen, it costs no later collection, automatic ones included, any time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # tracing makes many objects that go without the collector


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """What earlier files have left, such as modules that they import, costs the captures of this one no time."""
    if len(gc.get_objects()) > 50_000:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Seeds. On a GPU, what the test has left behind gives its memory back at once."""
    torch.manual_seed(0)
    yield
    if torch.cuda.is_available():
        gc.collect()


@pytest.fixture
def transform(backend: str) -> Callable[..., Any]:
    """Makes a transform on the backend under test, with arenas poisoned at release."""
    return lambda **options: cudagraph_transform(**{"backend": backend, "debug": True, **options})


@pytest.fixture
def twins(transform: Callable[..., Any], device: str) -> Callable[..., tuple[Any, Any]]:
    """Compiles a module or a function twice, without and with the transform; modules get equal weights of their own."""

    def make(fn: Any, jit: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
        fn = fn.to(device) if isinstance(fn, torch.nn.Module) else fn
        return twice(fn, transform(**options), **(jit or {}))

    return make


@pytest.fixture
def each_leaves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, too, results leave as soon as they can, however small they are."""
    monkeypatch.setattr(pool, "EARLY_COPY_BYTES", 0)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits twice, so that any difference is the package's."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # adaptive pooling has no deterministic backward
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's pieces stay apart, as where sizes change."""
    monkeypatch.setattr("thunder_cg.dynamo.compiler.join_pieces", lambda parts, _, **__: parts)
