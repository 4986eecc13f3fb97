"""`HorovodRunner`, as in sparkdl."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Unpack

from sparkdist import validation
from sparkdist.driver.slots import all_slots
from sparkdist.errors import ConfigurationError
from sparkdist.launcher import Launcher
from sparkdist.settings import Settings, SettingsArgs

_LOGS = {"all": "all", "log_callback_only": "none"}


class HorovodRunner:
    """Runs Horovod training on a gang of ranks: change the import from sparkdl's and nothing else.

    Args:
        np: Number of ranks. More than 0: in Spark tasks, one per slot, or per GPU where Spark gives
            them to tasks. Less than 0: so many on the driver. 0: as many as the cluster has slots,
            which is deprecated.
        driver_log_verbosity: `"all"`: the driver prints every line of every rank.
            `"log_callback_only"`: only what `log_to_driver` and `LogCallback` of
            `sparkdist.horovod` send.

    Raises:
        ConfigurationError: An argument is not valid.
    """

    _settings: ClassVar[SettingsArgs] = {}

    def __init__(
        self, *, np: int, driver_log_verbosity: Literal["all", "log_callback_only"] = "log_callback_only"
    ) -> None:
        self._np = validation.integer("np", np)
        validation.check_choice("driver_log_verbosity", driver_log_verbosity, tuple(_LOGS))
        if self._np == 0:
            text = "np=0, for all slots of the cluster, is deprecated: name the number of ranks"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        self._logs = _LOGS[driver_log_verbosity]

    @classmethod
    def configure(cls, **settings: Unpack[SettingsArgs]) -> type[HorovodRunner]:
        """Returns a HorovodRunner with settings of the engine.

        ```python
        HorovodRunner.configure(timeout=3600, max_restarts=2)(np=8).run(train)
        ```

        Args:
            **settings: See `sparkdist.Settings`. `logs` counts before `driver_log_verbosity`.

        Raises:
            ConfigurationError: A name is unknown or a value is not valid.
        """
        values = {**cls._settings, **settings}
        checked = Settings.of(**values)
        # As they were checked: what was passed may change.
        kept = {name: getattr(checked, name) for name in values}
        return type(cls.__name__, (cls,), {"__doc__": cls.__doc__, "_settings": kept})

    def run(self, /, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Runs `main` on every rank and returns what it returned on rank 0.

        Args:
            main: The function; `horovod.torch.init()` and its kin just work in it.
            **kwargs: Its arguments.

        Raises:
            ConfigurationError: An input is not valid; no job was started.
            PreflightError: The session, the cluster or an executor cannot run this.
            TrainingFailed: A rank failed.
            TrainingTimeout: `timeout` or `start_timeout` passed.
            ResultError: The value could not be brought to the driver.
        """
        if not callable(main):
            raise ConfigurationError(f"main must be a function, not {main!r:.200}")
        settings: SettingsArgs = {"logs": self._logs, **self._settings}  # type: ignore[typeddict-item]
        launcher = Launcher(
            "horovod",
            num_processes=abs(self._np) or all_slots(settings.get("spark"), settings.get("resources")),
            local_mode=self._np < 0,
            **settings,
        )
        return launcher.run(main, **kwargs)
