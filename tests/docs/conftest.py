"""The surroundings of one who reads the pages."""

import os

import pytest

from tests.docs.pages import ROOT
from tests.forks import forks

collect_ignore = ["few_files.py"]  # no tests; who imports it has few files from then on


@pytest.fixture(scope="session")
def reader(tmp_path_factory):
    """The environment: the command of this checkout and this Python, whatever else is installed, on one device: two
    would wait for each other where other tests work beside them."""
    folder = tmp_path_factory.mktemp("bin")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    own = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    with forks(folder, own, "tests.docs.few_files"):
        yield own
