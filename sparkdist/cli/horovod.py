"""`sparkdist horovod`: a Horovod that builds, and one that explains itself."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import click

from sparkdist.errors import ConfigurationError
from sparkdist.horovod.build.diagnosis import BuildError, Diagnosis
from sparkdist.horovod.build.plan import FLAGS, VERSIONS, Wish
from sparkdist.horovod.build.provision import provide
from sparkdist.horovod.build.state import Extension, examine, installed
from sparkdist.horovod.build.wheel import Workshop

_PART = click.Choice(list(FLAGS))


@click.group("horovod")
def horovod_group() -> None:
    """Builds, installs and checks real Horovod in this Python."""


@horovod_group.command("build")
@click.option("--version", "number", type=click.Choice(VERSIONS), default=VERSIONS[-1], show_default=True)
@click.option(
    "--gpu/--cpu", "gpu", default=None, help="With NCCL, or without. [default: if all for it is here]"
)
@click.option("--with", "included", type=_PART, multiple=True, help="Insist on a framework or backend.")
@click.option("--without", "excluded", type=_PART, multiple=True, help="Leave a framework or backend out.")
@click.option(
    "--wheel-dir", type=click.Path(file_okay=False, path_type=Path), help="Leave the wheel there, too."
)
@click.option("--jobs", type=click.IntRange(min=1), help="Compilers at a time. [default: one for each core]")
@click.option("--rebuild", is_flag=True, help="Build and install it though it is there.")
@click.option("--uninstall", is_flag=True, help="Remove Horovod instead.")
def build_command(
    number: str,
    gpu: bool | None,
    included: tuple[str, ...],
    excluded: tuple[str, ...],
    wheel_dir: Path | None,
    jobs: int | None,
    rebuild: bool,
    uninstall: bool,
) -> None:
    """Builds Horovod for this Python's frameworks, installs it, and proves it with two ranks.

    A wheel is built once and kept in ~/.cache/sparkdist/horovod. HOROVOD_* in the environment are
    Horovod's own switches, and reach its build.
    """
    # The compilers end with us, whoever ends us.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    shop = Workshop(dict(os.environ), click.echo, jobs)
    wish = Wish(version=number, gpu=gpu, included=frozenset(included), excluded=frozenset(excluded))
    try:
        if uninstall:
            _uninstall(shop)
        else:
            provide(wish, shop, rebuild=rebuild, wheel_dir=wheel_dir)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    except BuildError as error:
        raise click.ClickException(str(error)) from error


def _uninstall(shop: Workshop) -> None:
    found = installed()
    if found is None:
        click.echo("Horovod is not installed: nothing to do")
        return
    shop.uninstall()
    if found.folder.exists():
        raise BuildError(f"pip left {found.folder} alone: it is outside this Python's own folders")
    click.echo(f"removed Horovod {found.version}")


@horovod_group.command("check")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def check_command(context: click.Context, as_json: bool) -> None:
    """Tells which extensions of Horovod there are, whether they work, and what to type if not.

    Ends with 0 if at least one works.
    """
    report = examine()
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        click.echo(f"Horovod {report.version or 'is not installed'} in {report.python}")
        for name, value in report.built_for.items():
            click.echo(f"  built with {name}: {value}")
        for extension in report.extensions:
            click.echo(f"  {_line(extension)}")
            _tell(extension.problem)
        _tell(report.problem)
    context.exit(0 if report.works else 1)


def _line(extension: Extension) -> str:
    now = extension.now or "not installed"
    if not extension.built:
        return f"{extension.framework} ({now}): no extension"
    state = "works" if extension.works else "DOES NOT WORK"
    built = f"built for {extension.built_for or 'an unknown version'}, installed {now}"
    parts = [name for name, there in extension.backends.items() if there]
    return f"{extension.framework}: {state} ({built}{'; with ' + ', '.join(parts) if parts else ''})"


def _tell(problem: Diagnosis | None) -> None:
    if problem is not None:
        click.echo(f"    {problem.cause}")
        for command in problem.commands:
            click.echo(f"    $ {command}")
