"""Run a program in a rank as the interpreter does: `python script.py` or `python -m module`.

A rank that runs a user's program gets the words DIRECTORY script.py ... after `-m` and the name of
this module. It changes to the directory, and finds the modules there that it would find under
torchrun; until then, rollcall's own copy of the code is first on the path.
"""

import builtins
import contextlib
import gc
import importlib.machinery
import io
import multiprocessing.process
import os
import pkgutil
import re
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rollcall.cli.installation import USER_PROGRAM, is_training


def run(program: Sequence[str]) -> None:
    """Run `script.py …` or `-m module …` as `__main__`; its exceptions reach the caller."""
    is_users = tuple(program[:2]) == USER_PROGRAM
    directory = program[2] if is_users else str(Path.cwd())
    words = list(program[3:] if is_users else program)
    os.chdir(directory)
    os.environ["PWD"] = directory
    # Of this process's import; multiprocessing looks there for the script of a spawned process.
    multiprocessing.process.ORIGINAL_DIR = directory  # type: ignore[attr-defined]
    sys.modules["__main__"] = main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    if Path(words[0]).is_file():  # it may be a script for torch.distributed.launch
        text = Path(words[0]).read_text("utf-8", "replace")
        for option in re.findall("[\"'](--local[_-]rank)[\"']", text)[:1]:
            words.insert(1, f"{option}={os.environ['LOCAL_RANK']}")
    sys.argv, sys.orig_argv = [*words], [sys.executable, "-u", *words]
    if is_users and is_training(program):
        sys.path.append(sys.path[0])  # processes that the training starts import rollcall, too
    if words[0] == "-m":
        sys.argv[:2] = ["-m"]
        if is_users:
            sys.path[0] = directory
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    elif pkgutil.get_importer(words[0]) is not None:  # a directory or an archive
        sys.path[0] = words[0]
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        _run_script(words[0], main)


def _run_script(script: str, main: ModuleType) -> None:
    path = os.path.abspath(script)  # noqa: PTH100 - as the interpreter sets __file__
    sys.path[0] = str(Path(script).resolve().parent)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __loader__=loader, __cached__=None)
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def show_error(error: BaseException) -> None:
    """Print an exception as the interpreter would, without rollcall's frames."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__package__") == __package__:
        frames = frames.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(frames), frames)
    except BaseException:  # the program's own hook fails
        traceback.print_exc()


def close_files() -> None:
    """Close the files that the program left open, as unloading it would: this writes their end."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, io.IOBase)}
    files = [item for item in objects if type(item) in kinds]
    # From the outermost to the innermost: a text file may write to a compressed one, for example.
    plain = (io.BufferedWriter, io.BufferedRandom, io.FileIO)
    files.sort(key=lambda file: (type(file) in plain, not isinstance(file, io.TextIOBase)))
    for file in files:
        with contextlib.suppress(Exception):  # such as a full disk; the interpreter ignores it, too
            file.close()
