"""Installing with a compiler and without one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.agent.fingerprint import kernel

REPOSITORY = Path(__file__).parents[3]
FILES = ["agent/fingerprint/kernel.c", "agent/fingerprint/__init__.py", "agent/__init__.py"]
COMPILER = shutil.which(os.environ.get("CC", "cc"))


def build(folder, compiler):
    """What `pip install` does about the kernel; where the library would be."""
    for name in [*FILES, "setup.py", "pyproject.toml", "README.md", "LICENSE"]:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((REPOSITORY / name).read_bytes())
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "build_ext", "--inplace"],
        cwd=folder,
        env={**os.environ, "CC": compiler},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "agent" / "fingerprint" / "_kernel.so", done.stdout + done.stderr


def test_without_a_compiler_the_installation_goes_on(tmp_path):
    library, said = build(tmp_path, "no-such-compiler")
    assert not library.exists()
    assert "_kernel" in said


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_with_a_compiler_the_kernel_is_built_without_a_warning(tmp_path):
    library, said = build(tmp_path, f"{COMPILER} -Wall -Wextra -Werror")
    assert library.exists(), said


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_here_the_kernel_is_built_from_the_file_as_it_is():
    assert kernel.load() is not None, "run `make install`"


def test_what_is_no_library_of_ours_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel, "__file__", str(tmp_path / "kernel.py"))
    assert kernel.load.__wrapped__() is None
    (tmp_path / "_kernel.so").write_bytes(b"built for another machine")
    assert kernel.load.__wrapped__() is None


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_a_library_of_another_version_is_not_used(tmp_path, monkeypatch):
    source = tmp_path / "other.c"
    source.write_text("int rankscope_version(void) { return -1; }\n")
    library = tmp_path / "_kernel.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    monkeypatch.setattr(kernel, "__file__", str(tmp_path / "kernel.py"))
    assert kernel.load.__wrapped__() is None
