#!/usr/bin/env bash
# Makes .venv with everything that tests, lint and the demo need, and finds Java for Spark.
# Does nothing where that is done already, and only what is missing where the pins have changed.
set -euo pipefail
cd -P "$(dirname "$0")/.."

venv=.venv
log=$venv/setup.log
stamp=$venv/stamp
env_file=$venv/env.sh # `. .venv/env.sh` gives Spark this Python and the Java that was found here

say() { echo "setup: $*"; }
fail() {
    echo "setup: $*" >&2
    exit 1
}

# --- Python -------------------------------------------------------------------------------------

# 3.11 first: constraints.txt was resolved with it.
find_python() {
    local name
    for name in python3.11 python3.12 python3.13 python3; do
        if "$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$name" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    fail "no Python 3.11 or newer with the venv module is on PATH. Install one (on Debian:" \
        "apt-get install python3 python3-venv) and run this again."
}

wanted_stamp() {
    cat setup.py setup.cfg constraints.txt scripts/setup.sh | sha256sum | cut -d' ' -f1
}

# Says what pip answered, without the lines that are noise in a failure.
show_log() {
    grep -v '^WARNING: Location' "$log" | tail -n 30 >&2
}

pip_install() {
    "$venv/bin/python" -m pip --disable-pip-version-check install -c constraints.txt "$@" >>"$log" 2>&1 || {
        show_log
        fail "pip failed; its last lines are above, all of them in $log"
    }
}

# A virtual environment cannot be moved, and ends with the Python it was made from.
venv_works() {
    grep -qsF " $PWD/$venv" "$venv/pyvenv.cfg" && "$venv/bin/python" -c '' 2>/dev/null
}

make_venv() {
    local python
    python=$(find_python)
    say "$("$python" -V) at $python"
    rm -rf "$venv"
    "$python" -m venv "$venv" || fail "$python -m venv $venv failed"
}

install_packages() {
    say "installing the pinned packages into $venv (minutes the first time; log: $log)"
    rm -f "$stamp" "$log"
    pip_install pip setuptools wheel
    # Without isolation, builds use the pinned setuptools too.
    pip_install --no-build-isolation -e '.[dev]'
    wanted_stamp >"$stamp"
    say "packages installed in $SECONDS s"
}

# --- Java ---------------------------------------------------------------------------------------

# The major version of the Java at $1, or nothing; "1.8.0_392" is Java 8.
java_major() {
    "$1" -version 2>&1 | sed -nE 's/.* version "(1\.)?([0-9]+).*/\2/p' | head -n 1
}

# Succeeds if $1 is a Java that Spark 4 can use; $2 says where it came from.
java_fits() {
    local major
    major=$(java_major "$1" || true)
    if [ "${major:-0}" -ge 17 ]; then
        return 0
    fi
    say "skipping $2 ($1): ${major:+Java $major, and }Spark needs a working Java 17 or newer"
    return 1
}

find_java() {
    if [ -n "${JAVA_HOME:-}" ] && java_fits "$JAVA_HOME/bin/java" JAVA_HOME; then
        java=$JAVA_HOME/bin/java
    elif command -v java >/dev/null && java_fits "$(command -v java)" "the java on PATH"; then
        # PATH may hold a shim that only java itself can see through.
        java=$(java -XshowSettings:properties -version 2>&1 | sed -nE 's/^ *java\.home = (.*)$/\1/p')/bin/java
    else
        return 1
    fi
}

install_java() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        return 1
    fi
    local package
    say "no Java 17 or newer; installing Debian's package"
    apt-get update >>"$log" 2>&1 || true # an old list may still do
    for package in openjdk-17-jre-headless openjdk-21-jre-headless default-jre-headless; do
        if DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$package" >>"$log" 2>&1; then
            # Not PATH: another, older Java may come first there.
            java=$(dpkg -L "$(real_package "$package")" | grep '/bin/java$' | head -n 1)
            java_fits "$java" "$package" && return 0
        fi
    done
    show_log
    return 1
}

# default-jre-headless holds no files: it depends on the package that does.
real_package() {
    if [ "$1" = default-jre-headless ]; then
        dpkg-query -W -f '${Depends}' "$1" | grep -oE 'openjdk-[0-9]+-jre-headless' | head -n 1
    else
        echo "$1"
    fi
}

# --- The story ----------------------------------------------------------------------------------

venv_works || make_venv
[ "$(cat "$stamp" 2>/dev/null)" = "$(wanted_stamp)" ] || install_packages
find_java || install_java || fail "Spark needs Java 17 or newer. Install it (on Debian: apt-get install" \
    "openjdk-17-jre-headless; elsewhere any JDK 17 or 21), or set JAVA_HOME to one, and run this again."
java_home=$(dirname "$(dirname "$java")")
# Spark would start its workers with whatever python3 is first on PATH.
exported=$(printf 'export JAVA_HOME=%q PYSPARK_PYTHON=%q' "$java_home" "$PWD/$venv/bin/python")
if [ "$(cat "$env_file" 2>/dev/null)" != "$exported" ]; then
    echo "$exported" >"$env_file"
    say "Java $(java_major "$java") at $java_home"
fi
