"""Everything about the package is in setup.cfg."""

from setuptools import setup

setup()
