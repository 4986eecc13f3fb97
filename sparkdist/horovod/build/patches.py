"""What the released source of Horovod 0.28 needs to compile and run today: small edits, by pattern.

An edit either applies as often as it says, or finds its result there already; all else is an error.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from sparkdist.horovod.build.diagnosis import BuildError


@dataclass(frozen=True)
class Edit:
    """One edit of the source.

    Attributes:
        file: The file, relative to the source's root.
        pattern: What to replace, a regular expression.
        replacement: What to put there, a template of `re`.
        done: A regular expression that tells a source which needs this edit no more.
        why: The reason, for people.
        count: How often `pattern` has to match.
    """

    file: str
    pattern: str
    replacement: str
    done: str
    why: str
    count: int = 1

    def apply(self, root: Path) -> bool:
        """Edits the file below `root`; returns whether that was needed.

        Raises:
            BuildError: The file is neither what this edit was made for, nor edited already.
        """
        path = root / self.file
        text = path.read_text() if path.is_file() else ""
        edited, count = re.subn(self.pattern, self.replacement, text)
        if count == self.count:
            path.write_text(edited)
            return True
        if count == 0 and path.is_file() and re.search(self.done, text):
            return False
        missing = "" if path.is_file() else " (there is no such file)"
        raise BuildError(
            f"the edit of {self.file}{missing} ({self.why}) should replace {self.count} x {self.pattern!r}"
            f" and found {count}: this is not a source of Horovod that sparkdist knows"
        )


_CXX_14 = r"set\(CMAKE_CXX_STANDARD 14\)"
_CXX_17 = r"set(CMAKE_CXX_STANDARD 17)"
_CXX_NEW = r"(?m)^\s*set\(CMAKE_CXX_STANDARD (?:17|2\d)\)"

EDITS = (
    Edit("CMakeLists.txt", _CXX_14, _CXX_17, _CXX_NEW, "torch >= 2.1 needs C++17"),
    Edit("horovod/torch/CMakeLists.txt", _CXX_14, _CXX_17, _CXX_NEW, "torch >= 2.1 needs C++17"),
    # For every C++ source, Horovod's and its third parties', who inherit these flags: dozens of files use
    # names of these two headers that older standard libraries brought along with others.
    Edit(
        "CMakeLists.txt",
        r"(-pthread -fPIC -Wall -ftree-vectorize)(?=\")",
        r"\1 -include cstdint -include algorithm",
        r"-include cstdint",
        "headers of gcc >= 13 include fewer others",
    ),
    Edit(
        "third_party/gloo/CMakeLists.txt",
        r"cmake_minimum_required\(VERSION 2\.8\.12",
        r"cmake_minimum_required(VERSION 3.5",
        r"cmake_minimum_required\(VERSION (?:3\.(?:[5-9]|\d\d)|[4-9])",
        "CMake 4 refuses projects for CMake < 3.5",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        r"from distutils\.sysconfig import get_python_inc; print\(get_python_inc\(\)\)",
        r"import sysconfig; print(sysconfig.get_path('include'))",
        r"sysconfig\.get_path\('include'\)",
        "Python 3.12 has no distutils",
    ),
    Edit(
        "horovod/runner/js_run.py",
        r"from distutils\.spawn import find_executable",
        r"from shutil import which as find_executable",
        r"from shutil import which",
        "Python 3.12 has no distutils",
    ),
    Edit(
        "setup.py",
        r"setup_requires=require_list if is_build_action\(\) else \[\]",
        r"setup_requires=[]",
        r"setup_requires=\[\]",
        "setuptools would install these where it builds, with pkg_resources, which it no longer has",
    ),
    Edit(
        "setup.py",
        r"if not os\.environ\.get\('HOROVOD_WITHOUT_PYTORCH'\):\n +require_list\.append\('cffi>=1\.4\.0'\)\n",
        r"",
        r"\A(?![\s\S]*cffi>=)",
        "nothing in Horovod uses cffi any more",
    ),
    # Else they use what the host's name means, which may be 127.0.0.1.
    Edit(
        "horovod/common/gloo/gloo_context.cc",
        r"(assert\(global_context\.IsEnabled\(\)\);\n)(?!  gloo_iface_)",
        r"\1  gloo_iface_ = global_context.gloo_iface_;\n",
        r"gloo_iface_ = global_context",
        "process sets, the one of all ranks too, have to use HOROVOD_GLOO_IFACE",
    ),
    Edit(
        "setup.py", r"else 'RelWithDebInfo'", r"else 'Release'", r"else 'Release'", "40 MB of debug symbols"
    ),
)

# Modules that no interpreter or setuptools of today has; an edit above removes each use that there was.
_GONE = re.compile(
    r"^\s*(?:from|import)\s+(?:distutils|pkg_resources|imp|pipes|asyncore|cgi)\b", re.MULTILINE
)


def apply_edits(root: Path) -> list[Edit]:
    """Edits the source below `root`; returns the edits that were needed.

    Raises:
        BuildError: An edit does not fit, or a module is still imported that no longer exists.
    """
    needed = [edit for edit in EDITS if edit.apply(root)]
    for path in (root / "setup.py", *sorted((root / "horovod").rglob("*.py"))):
        if found := _GONE.search(path.read_text()):
            raise BuildError(
                f"{path.relative_to(root)} has {found[0].strip()!r}, which is no more, and no edit removes it"
            )
    return needed


def digest() -> str:
    """Returns a digest of all edits: a wheel of other edits is another wheel."""
    edits = [(edit.file, edit.pattern, edit.replacement) for edit in EDITS]
    return hashlib.sha256(repr(edits).encode()).hexdigest()[:12]
