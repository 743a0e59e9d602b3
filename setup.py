"""The packages, found; the rest is in pyproject.toml. ``passes`` and ``models`` lie beside ``autoshard``, not in it."""

from setuptools import find_packages, setup

FOLDERS = {"autoshard": "autoshard", "autoshard.passes": "passes", "autoshard.models": "models"}

setup(
    package_dir=FOLDERS,
    packages=[
        ".".join(filter(None, (package, inner)))
        for package, folder in FOLDERS.items()
        for inner in ("", *find_packages(folder))
    ],
)
