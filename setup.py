"""Maps the folders at the top of the repository onto the namespace package `rankscope`."""

from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDERS = ["agent", "client", "server", "dashboard", "migrations"]
KERNEL = "rankscope.agent.fingerprint._kernel"


class BuildKernel(build_ext):
    """Builds a plain shared library: it is loaded by ctypes and knows nothing of Python."""

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split("."))) + ".so"


class AnyPython(bdist_wheel):
    """A wheel depends on the machine (the kernel), but not on the version of Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    package_dir={f"rankscope.{folder}": folder for folder in FOLDERS},
    packages=[
        f"rankscope.{package}"
        for package in find_packages(include=[x for f in FOLDERS for x in (f, f"{f}.*")])
    ],
    # Optional: without a compiler the installation goes on, and numpy does the kernel's work.
    ext_modules=[
        Extension(
            KERNEL,
            ["agent/fingerprint/kernel.c"],
            extra_compile_args=["-O3", "-g0", "-std=c11"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": AnyPython},
)
