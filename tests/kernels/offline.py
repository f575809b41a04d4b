"""Compiles the kernels that a call would launch, for GPUs that are not here.

`launches` runs a kernel module's host code on CPU tensors with every launch recorded instead of done; `build` compiles
one as Triton's launcher would have specialised it: pointers aligned, ones folded, multiples of 16 known as such.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import driver

__all__ = ["TARGETS", "Built", "Launch", "build", "launches"]

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.int8: "i8",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg", "launch_pdl")


@dataclass
class Launch:
    """One recorded launch: what its compilation depends on."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: list[str]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def key(self) -> str:
        return repr((self.name, self.signature, self.constants, self.aligned, self.options))


@dataclass
class Built:
    """Resources of a compiled kernel, its machine instructions and those of its longest loop (NVIDIA only).

    `layout` is that of most of its four-dimensional fp32 tensors, the pieces of a state; "" without any. `text` is its
    PTX, "" on AMD.
    """

    shared: int
    layout: str = ""
    text: str = ""
    ttgir: str = ""

    def scattered_reductions(self) -> list[str]:
        """Reductions over lanes that are no neighbours, as they come from axes that a reshape joined.

        Triton (3.6, 3.7) shuffles by powers of two from the first of these lanes on, and so adds up the wrong ones.
        """
        lanes = {
            name: [[int(x) for x in re.findall(r"\d+", basis)] for basis in re.findall(r"\[([^\[\]]*)\]", bases)]
            for name, bases in re.findall(r"^(#linear\d*) = .*? lane = \[(.*?)\], warp", self.ttgir, re.MULTILINE)
        }
        pattern = r'"tt\.reduce"\([^)]*\) <\{axis = (\d+) : i32\}>.*?\}\) : \((?:tensor<[\dx]+\w+, (.*?)>)\) ->'
        found = []
        for axis, layout in re.findall(pattern, self.ttgir, re.DOTALL):
            name, at = re.findall(r"#\w+", layout)[-1], int(axis)
            for dim in map(int, re.findall(r"dim = (\d+)", layout)):
                at += at >= dim
            mine = [i for i, basis in enumerate(lanes.get(name, [])) if basis[at]]
            if mine and mine != list(range(mine[0], mine[-1] + 1)):
                found.append(f"axis {axis} of {layout}: lanes {mine}")
        return found

    registers: int | None = None
    stack: int | None = None
    cubin: bytes = field(default=b"", repr=False)

    @property
    def sass(self) -> list[str]:
        return [text for _, text in self._lines]

    @functools.cached_property
    def loop(self) -> list[str]:
        return _longest_loop(self._lines)

    @functools.cached_property
    def _lines(self) -> list[tuple[int, str]]:
        """Taken apart where somebody looks: it takes half a second, as long as a small kernel takes to compile."""
        return _instructions(_tool("cuobjdump", self.cubin, "-sass")) if self.cubin else []

    def count(self, *prefixes: str) -> int:
        """Instructions of the loop that begin so."""
        return sum(line.startswith(prefixes) for line in self.loop)


def launches(call: Callable[[], object]) -> list[Launch]:
    """What `call` launches, each distinct kernel once."""
    found: dict[str, Launch] = {}

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = _launch(self, args, kwargs)
        found.setdefault(launch.key(), launch)

    original = triton.JITFunction.run
    triton.JITFunction.run = record
    try:
        call()
    finally:
        triton.JITFunction.run = original
    return list(found.values())


def _launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    assert set(values) == set(kernel.arg_names), set(values) ^ set(kernel.arg_names)
    launch = Launch(kernel, {}, {}, [], options)
    for parameter in kernel.params:
        name, value = parameter.name, values[parameter.name]
        specialize = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialize and isinstance(value, int) and value == 1):
            launch.signature[name], launch.constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            launch.signature[name] = "*" + _TYPES[value.dtype]
            launch.aligned.append(name)
        elif isinstance(value, float):
            launch.signature[name] = "fp32"
        else:
            launch.signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if specialize and value % 16 == 0:
                launch.aligned.append(name)
    return launch


def build(launch: Launch, target: str) -> Built:
    """Compiles `launch` for a name in `TARGETS`; raises what Triton raises."""
    position = {name: i for i, name in enumerate(launch.kernel.arg_names)}
    source = (GluonASTSource if launch.kernel.is_gluon() else ASTSource)(
        fn=launch.kernel,
        signature=launch.signature,
        constexprs={(position[name],): value for name, value in launch.constants.items()},
        attrs={(position[name],): [["tt.divisibility", 16]] for name in launch.aligned},
    )
    with _running_on(TARGETS[target]):
        compiled = triton.compile(source, target=TARGETS[target], options=launch.options)
    built = Built(
        shared=compiled.metadata.shared, layout=_layout(compiled.asm["ttgir"]), text=compiled.asm.get("ptx", "")
    )
    built.ttgir = compiled.asm["ttgir"]
    if "cubin" in compiled.asm:
        built.cubin = compiled.asm["cubin"]
        usage = _tool("cuobjdump", built.cubin, "-res-usage")
        built.registers = int(re.findall(r"REG:(\d+)", usage)[0])
        built.stack = int(re.findall(r"STACK:(\d+)", usage)[0])
    return built


class _Driver:
    """What a kernel finds when it asks which target it is compiled for."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextlib.contextmanager
def _running_on(target: GPUTarget) -> Iterator[None]:
    before = driver._active
    driver.set_active(_Driver(target))
    try:
        yield
    finally:
        driver._active = before


def _layout(ttgir: str) -> str:
    names = collections.Counter(re.findall(r"tensor<(?:\d+x){4}f32, (#\w+)>", ttgir))
    if not names:
        return ""
    name = names.most_common(1)[0][0]
    return re.findall(rf"^{name} = (.*)$", ttgir, re.MULTILINE)[0]  # type: ignore[no-any-return]


@functools.cache
def _tools() -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _tool(name: str, cubin: bytes, *arguments: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_tools() / name, *arguments, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _instructions(sass: str) -> list[tuple[int, str]]:
    """Addresses and instructions, predicates dropped."""
    return [
        (int(at, 16), re.sub(r"^@!?U?P\d+ ", "", text.strip()))
        for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/ +([^;]*?) ?;", sass)
    ]


def _longest_loop(lines: list[tuple[int, str]]) -> list[str]:
    """Instructions between a backward branch and its target."""
    best: list[str] = []
    for at, text in lines:
        target = re.match(r"BRA\S* .*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < at:
            body = [other for where, other in lines if int(target[1], 16) <= where <= at]
            best = max(best, body, key=len)
    return best
