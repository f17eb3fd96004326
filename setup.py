"""Maps the folders at the top of the repository onto the namespace package `rankscope`."""

from setuptools import find_packages, setup

FOLDERS = ["agent", "server", "dashboard", "migrations"]

setup(
    package_dir={f"rankscope.{folder}": folder for folder in FOLDERS},
    packages=[
        f"rankscope.{package}"
        for package in find_packages(include=[x for f in FOLDERS for x in (f, f"{f}.*")])
    ],
)
