"""`TorchDistributor`, as in pyspark.ml.torch.distributor."""

from __future__ import annotations

from typing import Any, Unpack

from sparkdist.launcher import SSL_CONF, Entry, Launcher
from sparkdist.results import Results
from sparkdist.settings import SettingsArgs


class TorchDistributor:
    """Runs PyTorch training on a gang of ranks: change the import from pyspark's and nothing else.

    Inside, `torch.distributed.init_process_group()` just works, as it does under torchrun.

    Args:
        num_processes: Number of ranks.
        local_mode: True: on the driver. False: in Spark tasks. None: in Spark tasks when a session
            is active, else on the driver without any Spark.
        use_gpu: True: one GPU per rank, an error where there are too few. False: CPU. None: GPUs
            where there are any: those of the driver, or those that Spark gives to tasks.
        _ssl_conf: Name of the Spark conf that allows training where spark.ssl.enabled is true.
        **settings: See `sparkdist.Settings`.

    Raises:
        ConfigurationError: An argument is not valid.
    """

    def __init__(
        self,
        num_processes: int = 1,
        local_mode: bool | None = None,
        use_gpu: bool | None = None,
        _ssl_conf: str = SSL_CONF,
        **settings: Unpack[SettingsArgs],
    ) -> None:
        self._launcher = Launcher(
            "torch",
            num_processes=num_processes,
            local_mode=local_mode,
            use_gpu=use_gpu,
            ssl_conf=_ssl_conf,
            **settings,
        )

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a function or a script on every rank and returns rank 0's value (None for a script).

        Args:
            *args: The function, or the path of the script, then its arguments. The function may
                also be given alone as `train_object=`, as in pyspark.
            **kwargs: The function's keyword arguments; a script takes none.

        Raises:
            ConfigurationError: An input is not valid; no job was started.
            PreflightError: The session, the cluster or an executor cannot run this.
            TrainingFailed: A rank failed.
            TrainingTimeout: `timeout` or `start_timeout` passed.
            ResultError: A return value could not be brought to the driver.
            TypeError: There is nothing to run.
        """
        entry, rest = _entry(args, kwargs)
        return self._launcher.run(entry, *rest, **kwargs)

    def launch(self, /, *args: Any, **kwargs: Any) -> Results:
        """Does what `run` does and returns every rank's result."""
        entry, rest = _entry(args, kwargs)
        return self._launcher.launch(entry, *rest, **kwargs)


def _entry(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Entry, tuple[Any, ...]]:
    """Finds what to run; every other keyword is the user's function's own."""
    if args:
        return args[0], args[1:]
    if "train_object" not in kwargs:
        raise TypeError("the function, or the path of a script, is missing")
    return kwargs.pop("train_object"), ()
