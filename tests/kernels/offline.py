"""Compiles the kernels that a call would launch, for GPUs that are not here.

`launches` runs a kernel module's host code on CPU tensors with every launch recorded instead of done; `build` compiles
one as Triton's launcher would have specialised it: pointers aligned, ones folded, multiples of 16 known as such;
`sketch` leaves the machine code out.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, code_generator, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import driver

__all__ = ["TARGETS", "Built", "Launch", "build", "launches", "sketch"]

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

    def leaking_pairs(self) -> list[str]:
        """Pairs of 32-bit numbers in a 64-bit register whose lower number may run over into the upper one.

        LLVM makes such pairs of neighbouring integers, here of a thread's rows and columns. Where it needs only the
        upper one it shifts the lower one out with a wide product (`mul.wide`), whose upper half is not cut off before
        the other number is joined to it.
        """
        made: dict[str, tuple[str, list[str]]] = {}
        found = []
        for line in self.text.splitlines():
            words = re.findall(r"[%\w.{}]+", line.partition("//")[0])
            if words and words[0].startswith("%p"):  # of a predicate
                words = words[1:]
            if len(words) < 3:
                continue
            name, target, *operands = words
            if name == "mov.b64" and target.startswith("{"):
                joined = made.get(operands[-1], ("", []))
                parts = [made.get(x, ("", []))[0] for x in joined[1]] if joined[0] == "or.b64" else []
                if any(part.startswith(("mul.wide", "mad.wide")) for part in parts):
                    found.append(line.strip())
            elif target.startswith("%rd"):
                made[target] = name, operands
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
        elif hasattr(value, "block_shape"):
            what = f"{_TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}"
            launch.signature[name] = f"tensordesc<{what}>"
        elif isinstance(value, float):
            launch.signature[name] = "fp32"
        else:
            launch.signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if specialize and value % 16 == 0:
                launch.aligned.append(name)
    return launch


class _Functions:
    """Device functions that a kernel calls, by the names that Triton 3.6 gives them.

    It takes the tensors of all arguments in a row: two tuples of two of one shape each, or of three and of one, are
    the same to it, and the second call runs what was compiled for the first.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, Any] = {}
        self.clashes: list[Any] = []

    def note(self, fn: Any, args: Any, kwargs: Any) -> None:
        given = inspect.getcallargs(fn.fn, *args, **kwargs)
        tensors, constants = [], []
        for path, value in _flat(tuple(given[name] for name in fn.arg_names)):
            if hasattr(value, "handle") and hasattr(value, "type"):
                tensors.append((path, value.type.mangle()))
            else:
                constants.append((path, str(value)))
        key = fn.__module__, fn.__name__, tuple(kind for _, kind in tensors), tuple(constants)
        where = [path for path, _ in tensors]
        if self._seen.setdefault(key, where) != where:
            self.clashes.append((fn.__name__, self._seen[key], where))


def _flat(x: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    if isinstance(x, (tuple, triton.language.tuple)):
        for i, value in enumerate(x):
            yield from _flat(value, (*path, i))
    else:
        yield path, x


@contextlib.contextmanager
def _functions() -> Iterator[None]:
    """Fails where a kernel that is compiled inside has two functions of one name."""
    found, generator = _Functions(), code_generator.CodeGenerator
    original = generator.call_JitFunction

    def call(self: Any, fn: Any, args: Any, kwargs: Any, caller_context: Any = None) -> Any:
        found.note(fn, args, kwargs)
        return original(self, fn, args, kwargs, caller_context)

    generator.call_JitFunction = call
    try:
        yield
    finally:
        generator.call_JitFunction = original
    assert not found.clashes, found.clashes


def _sound(built: Built) -> Built:
    """`built`, unless it is known to compute something else than its source says."""
    assert not (found := built.leaking_pairs()), found
    return built


def _source(launch: Launch) -> Any:
    position = {name: i for i, name in enumerate(launch.kernel.arg_names)}
    return (GluonASTSource if launch.kernel.is_gluon() else ASTSource)(
        fn=launch.kernel,
        signature=launch.signature,
        constexprs={(position[name],): value for name, value in launch.constants.items()},
        attrs={(position[name],): [["tt.divisibility", 16]] for name in launch.aligned},
    )


def sketch(launch: Launch, target: str) -> Built:
    """`build` but for the assembler, which takes most of the time: no registers, no machine code. NVIDIA's only."""
    source, gpu = _source(launch), TARGETS[target]
    with _running_on(gpu), _functions():
        backend = make_backend(gpu)
        options = backend.parse_options(launch.options | source.parse_options())
        stages: dict[str, Any] = {}
        backend.add_stages(stages, options, source.language)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions = backend.get_codegen_implementation(options)
        module = source.make_ir(gpu, options, functions, backend.get_module_map(), context)
        metadata, text = {"target": gpu, **options.__dict__}, ""
        for name, stage in stages.items():
            module = stage(module, metadata)
            if name == "ttgir":
                text = str(module)
            if name == "ptx":
                break
    return _sound(Built(shared=metadata["shared"], layout=_layout(text), text=module, ttgir=text))


def build(launch: Launch, target: str) -> Built:
    """Compiles `launch` for a name in `TARGETS`; raises what Triton raises."""
    source = _source(launch)
    with _running_on(TARGETS[target]), _functions():
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
    return _sound(built)


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
