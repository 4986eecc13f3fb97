"""All commands, each group from its own module."""

from __future__ import annotations

import click

import sparkdist as package
from sparkdist.cli.horovod import horovod_group


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package.__version__)
def sparkdist() -> None:
    """Distributed training on Apache Spark."""


sparkdist.add_command(horovod_group)
