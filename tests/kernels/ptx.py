"""The few PTX instructions that kernels write themselves, on a CPU: 32 bits a register, a numpy array each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["run"]


def _prmt(a: Any, b: Any, selector: Any) -> Any:
    """Bytes of b and a, b's on top; a selector's highest bit asks for a byte's sign instead."""
    both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
    found = np.zeros_like(both)
    for i in range(4):
        nibble = int(selector) >> (4 * i) & 15
        byte = both >> np.uint64(8 * (nibble & 7)) & np.uint64(0xFF)
        if nibble & 8:
            byte = (byte >> np.uint64(7)) * np.uint64(0xFF)
        found |= byte << np.uint64(8 * i)
    return found.astype(np.uint32)


def _lop3(a: Any, b: Any, c: Any, table: Any) -> Any:
    found = np.zeros_like(a | b | c)
    for i in range(8):
        if int(table) >> i & 1:
            bits = [x if i >> (2 - n) & 1 else ~x for n, x in enumerate((a, b, c))]
            found |= bits[0] & bits[1] & bits[2]
    return found


def _float(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Of numbers that float64 holds, once rounded: sums of products of fp32 almost always."""

    def rounded(*registers: Any) -> Any:
        with np.errstate(all="ignore"):
            numbers = (np.asarray(x, np.uint32).view(np.float32).astype(np.float64) for x in registers)
            return np.asarray(operation(*numbers), np.float32).view(np.uint32)

    return rounded


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "xor.b32": lambda a, b: a ^ b,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "fma.rn.f32": _float(lambda a, b, c: a * b + c),
    "add.rn.f32": _float(lambda a, b: a + b),
    "sub.rn.f32": _float(lambda a, b: a - b),
    "mul.rn.f32": _float(lambda a, b: a * b),
    "neg.f32": _float(lambda a: -a),
    "rcp.approx.ftz.f32": _float(lambda a: 1 / a),
}


def run(asm: str, arguments: Sequence[Any], outputs: int) -> list[Any]:
    """Results $0, $1, ... of `asm`, as registers; the arguments, arrays of 32 bits, follow them."""
    registers = {f"${outputs + i}": np.asarray(x).view(np.uint32) for i, x in enumerate(arguments)}

    def value(name: str) -> Any:
        if name.startswith("0f"):
            return np.uint32(int(name[2:], 16))
        return np.uint32(int(name, 0)) if name[0].isdigit() else registers[name]

    for line in re.sub(r"[{}]", ";", asm).split(";"):
        operation, _, names = line.strip().partition(" ")
        if operation and operation != ".reg":
            target, *operands = (name.strip() for name in names.split(","))
            registers[target] = _OPERATIONS[operation](*map(value, operands))
    return [registers[f"${i}"] for i in range(outputs)]
