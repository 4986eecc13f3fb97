"""`LogCallback` in trainings of a real Keras, and which Keras it takes where there are several."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkdist import HorovodRunner
from sparkdist.horovod import LogCallback, log_to_driver

ROOT = Path(__file__).parents[2]
VALUE = r"\d[\d.e+-]*"
METRICS = f": loss={VALUE}, mae={VALUE}"


def fit(*callbacks: Any) -> None:
    import keras
    import numpy as np

    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    x, y = np.ones((8, 3)), np.ones((8, 1))
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=list(callbacks))
    model.evaluate(x, y, batch_size=4, verbose=0, callbacks=list(callbacks))


def expected(per_batch: bool, at_begin: str = "") -> list[str]:
    """What is logged, as regular expressions."""
    lines = []
    for epoch in ("1/2", "2/2"):
        lines += [f"epoch {epoch} begins", *([at_begin] if at_begin else [])]
        lines += [f"epoch {epoch}, batch {batch}/2{METRICS}" for batch in (1, 2) if per_batch]
        lines += [rf"epoch {epoch} ended after \d+\.\d s{METRICS}"]
    return lines


def test_what_it_logs(clean, capfd):
    def train() -> bool:
        quiet = LogCallback()  # Keras is imported here
        import keras

        class Loud(LogCallback):
            """A user's own."""

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                super().on_epoch_begin(epoch, logs)
                log_to_driver("aloud")

        loud = Loud(True)
        for callback in (quiet, pickle.loads(pickle.dumps(LogCallback(per_batch_log=True))), loud):
            fit(callback)
        return all(
            isinstance(callback, kind)
            for callback in (quiet, loud)
            for kind in (keras.callbacks.Callback, LogCallback)
        ) and isinstance(loud, Loud)

    # One run for all: each imports Keras anew.
    run = HorovodRunner.configure(env={"KERAS_BACKEND": "torch"}, timeout=60)(np=-1).run
    assert run(train) is True
    patterns = [*expected(False), *expected(True), *expected(True, "aloud")]
    said = capfd.readouterr().out.splitlines()
    assert len(said) == len(patterns), said
    for line, pattern in zip(said, patterns, strict=True):
        assert re.fullmatch(rf"\[rank 0\] {pattern}", line), (line, pattern)


DRIVER = """
import keras
from sparkdist.horovod import HorovodRunner, LogCallback

callback = LogCallback(per_batch_log=True)
assert isinstance(callback, keras.callbacks.Callback), type(callback).__mro__


def train(callback):
    import keras
    import numpy as np

    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0, callbacks=[callback])
    return isinstance(callback, LogCallback) and isinstance(callback, keras.callbacks.Callback)


assert HorovodRunner.configure(forward_env=["KERAS_BACKEND"])(np=-1).run(train, callback=callback)
"""


@pytest.mark.slow
def test_keras_first_and_a_callback_made_on_the_driver():
    out = python(DRIVER, KERAS_BACKEND="torch").splitlines()
    patterns = (
        "epoch 1/1 begins",
        f"epoch 1/1, batch 1/1: loss={VALUE}",
        r"epoch 1/1 ended after .* s: loss.*",
    )
    assert len(out) == 3
    for line, pattern in zip(out, patterns, strict=True):
        assert re.fullmatch(rf"\[rank 0\] {pattern}", line)


def python(code: str, *options: str, **environ: str) -> str:
    command = [sys.executable, *options, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"]
    done = subprocess.run(command, cwd="/", env={**os.environ, **environ}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


# --- which Keras --------------------------------------------------------------------------------

# Only their names and places count here: tf_keras and TensorFlow are large.
CALLBACKS = "class Callback: source = __name__\n"
PACKAGES = {
    "keras/__init__.py": "from keras import callbacks",
    "keras/callbacks.py": CALLBACKS,
    "tf_keras/__init__.py": "from tf_keras import callbacks",
    "tf_keras/callbacks.py": CALLBACKS,
    "tensorflow/__init__.py": "class keras:\n  class callbacks:\n    class Callback: source = 'tensorflow'",
}


@pytest.mark.parametrize(
    ("installed", "loaded", "chosen"),
    [
        (("keras", "tf_keras", "tensorflow"), (), "keras.callbacks"),
        (("keras", "tf_keras", "tensorflow"), ("tensorflow", "tf_keras"), "tf_keras.callbacks"),
        (("keras", "tf_keras", "tensorflow"), ("tensorflow",), "tensorflow"),
        (("keras", "tf_keras", "tensorflow"), ("tensorflow", "keras"), "keras.callbacks"),
        (("tf_keras", "tensorflow"), (), "tf_keras.callbacks"),
        (("tensorflow",), (), "tensorflow"),
    ],
)
def test_the_keras_that_is_loaded_is_taken_or_else_one_that_is_installed(installed, loaded, chosen, tmp_path):
    for name, text in PACKAGES.items():
        path = tmp_path / name
        if path.parent.name in installed:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    code = (
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from sparkdist.horovod import LogCallback\n"
        f"for name in {loaded!r}: __import__(name)\n"
        "callback = LogCallback()\n"
        "print(callback.source, isinstance(callback, LogCallback), callback.per_batch_log)"
    )
    assert python(code, "-S") == f"{chosen} True False"


def test_without_any_keras():
    code = (
        "from sparkdist.horovod import LogCallback\n"
        "try: LogCallback()\n"
        "except ImportError as error: print(error)"
    )
    said = python(code, "-S")
    assert "LogCallback needs Keras" in said and "keras, tf_keras" in said
