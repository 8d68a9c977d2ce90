"""The plugin of pytest: the marker `ranks`, and the fixture `same_on_ranks`.

    @pytest.mark.ranks(1, 2, 4)
    def test_my_layer(ranks): …              its body runs on each number of ranks

    def test_step(same_on_ranks):
        same_on_ranks(step, ranks=(1, 2), steps=5)

Every run of pytest imports this module where allranks is installed, so it imports no framework, and
nothing else of allranks before a test asks for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

MARKER = (
    'ranks(*numbers, backend="gloo", timeout=60): run the body of the test on so many ranks, each '
    "a process of its own in one process group; needs the argument `ranks`"
)


def _load(module: str) -> Any:
    return importlib.import_module(f"allranks.testing.{module}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("ranks_backend", "process group of tests on ranks", default="gloo")
    parser.addini("ranks_timeout", "seconds without progress that end a test", default="60")
    parser.addini("ranks_preload", "modules to import once for all ranks", type="args", default=[])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is not None and "ranks" in metafunc.fixturenames:
        metafunc.parametrize("ranks", marker.args or [None], indirect=True)


@pytest.fixture(scope="session")
def ranks_server(pytestconfig: pytest.Config) -> Iterator[Any]:
    """The fork server of this process of pytest, for all its tests on ranks."""
    worlds = _load("worlds").Worlds(pytestconfig.getini("ranks_preload"))
    yield worlds
    worlds.close()


@pytest.fixture
def ranks(request: pytest.FixtureRequest, ranks_server: Any) -> Any:
    """On a rank: `ranks.rank` and `ranks.world`, two numbers. Needs the marker `ranks`."""
    if not hasattr(request, "param"):
        pytest.fail("the fixture `ranks` needs the marker: @pytest.mark.ranks(1, 2)", pytrace=False)
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a marked test on ranks in the place of this process."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    values = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    options = {**_options(pyfuncitem.config), **marker.kwargs}
    worlds = pyfuncitem._request.getfixturevalue("ranks_server")
    failed, skipped = _load("same").run_body(worlds, pyfuncitem.obj, values, marker.args, options)
    if failed:
        pytest.fail(failed, pytrace=False)
    if skipped:
        pytest.skip(skipped)
    return True


@pytest.fixture
def same_on_ranks(ranks_server: Any, pytestconfig: pytest.Config) -> Callable[..., None]:
    """`same_on_ranks(step, ranks=(1, 2), steps=1)`: the same tensors on each number of ranks."""
    comparison: Callable[..., None] = _load("same").SameOnRanks(
        ranks_server, _options(pytestconfig)
    )
    return comparison


def _options(config: pytest.Config) -> dict[str, Any]:
    return {"backend": config.getini("ranks_backend"), "timeout": config.getini("ranks_timeout")}
