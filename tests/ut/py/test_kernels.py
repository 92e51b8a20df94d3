"""Native kernels compile once, load by path and symbol, and say why they do not."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from simpler.errors import ConfigError
from simpler.kernels import NativeKernel, compile_kernel, get_include

C = "#include <simpler/kernel.h>\nint seven(const simpler_kernel_args *args) { (void)args; return 7; }\n"
CXX = """
#include <simpler/kernel.h>
#include <vector>
extern "C" int eight(const simpler_kernel_args *) { return static_cast<int>(std::vector<int>(8).size()); }
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SIMPLER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def call(kernel: NativeKernel) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(kernel.address())(None))


def test_c_compiles_and_runs() -> None:
    assert call(compile_kernel(C, "seven")) == 7


def test_cxx_is_told_by_extern_c() -> None:
    assert call(compile_kernel(CXX, "eight")) == 8


@pytest.mark.parametrize("flags", [("-x", "c++"), ("-xc++",), ("-x c++",)])
def test_the_language_can_be_named(flags: tuple[str, ...]) -> None:
    source = "#ifndef __cplusplus\n#error C\n#endif\n" + 'extern "C" int nine(const void *) { return 9; }'
    assert call(compile_kernel(source, "nine", flags=flags)) == 9


def test_a_comment_with_extern_c_can_be_compiled_as_c() -> None:
    source = '/* extern "C" */ int f(const void *args) { int class = 4; (void)args; return class; }'
    assert call(compile_kernel(source, "f", flags=("-x", "c"))) == 4


def test_other_languages_are_refused() -> None:
    with pytest.raises(ConfigError, match="fortran"):
        compile_kernel(C, "seven", flags=("-x", "fortran"))


def test_the_source_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "seven.c"
    file.write_text(C)
    assert call(compile_kernel(file, "seven")) == 7


def test_the_same_kernel_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_kernel(C, "seven")
    stamp = first.path.stat().st_mtime_ns
    second = compile_kernel(C, "seven")
    assert second == first
    assert second.path.stat().st_mtime_ns == stamp
    assert list(cache.iterdir()) == [first.path]


def test_what_changes_the_code_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = tmp_path / "my-cc"
    wrapper.write_text('#!/bin/sh\nexec cc "$@"\n')
    wrapper.chmod(0o755)
    paths = {
        compile_kernel(C, "seven").path,
        compile_kernel(C + " ", "seven").path,
        compile_kernel(C, "seven", flags=("-O1",)).path,
        compile_kernel(C, "seven", flags=("-O1", "-g")).path,
    }
    monkeypatch.setenv("CC", str(wrapper))
    paths.add(compile_kernel(C, "seven").path)
    assert len(paths) == 5


def test_flags_reach_compiler_and_linker() -> None:
    source = "#include <math.h>\nint f(const void *a) { return (int)sqrt(VALUE + (a ? 1 : 0)); }"
    assert call(compile_kernel(source, "f", flags=("-DVALUE=81", "-lm"))) == 9


def test_the_compilers_complaint_comes_out_whole(cache: Path) -> None:
    with pytest.raises(ConfigError, match="undeclared_thing"):
        compile_kernel("int f(const void *a) { return undeclared_thing; }", "f")
    assert list(cache.iterdir()) == []


def test_a_source_without_the_symbol_is_refused() -> None:
    with pytest.raises(ConfigError, match="no symbol 'eleven'"):
        compile_kernel(C, "eleven")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(ConfigError, match=r"'no-such-compiler'.*CC"):
        compile_kernel(C, "seven")


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SIMPLER_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="SIMPLER_CACHE_DIR"):
        compile_kernel(C, "seven")


def test_the_cache_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIMPLER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compile_kernel(C, "seven").path.parent == tmp_path / "xdg" / "simpler" / "kernels"


def test_a_built_library_loads_by_path_and_symbol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = compile_kernel(C, "seven")
    monkeypatch.chdir(built.path.parent)
    kernel = NativeKernel.load(built.path.name, "seven")
    assert kernel.path == built.path
    with pytest.raises(ConfigError, match="no symbol"):
        NativeKernel.load(built.path, "eight")
    with pytest.raises(ConfigError, match="cannot load"):
        NativeKernel.load(tmp_path / "nothing.so", "seven")


def test_a_kernel_pickles_as_its_path_and_symbol() -> None:
    kernel = compile_kernel(C, "seven")
    copy = pickle.loads(pickle.dumps(kernel))
    assert copy == kernel
    assert copy.address() == kernel.address()


def test_the_names_of_a_library_stay_its_own() -> None:
    compile_kernel(C, "seven").address()
    with pytest.raises(AttributeError):
        _ = ctypes.CDLL(None).seven


def test_the_header_is_where_get_include_says() -> None:
    assert (Path(get_include()) / "simpler" / "kernel.h").is_file()


def test_many_processes_may_compile_the_same_at_once(cache: Path) -> None:
    script = "import sys, simpler.kernels as k; k.compile_kernel(sys.argv[1], 'seven').address()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    racing = [subprocess.Popen([sys.executable, "-c", script, C], env=environment) for _ in range(6)]
    assert [process.wait(100) for process in racing] == [0] * 6
    assert len(list(cache.iterdir())) == 1
