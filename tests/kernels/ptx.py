"""What the few PTX instructions of `kernels.gpu.weight_codes` do, on arrays of registers, so that they are tested
without a GPU.

Source: NVIDIA, PTX ISA, "Logic and shift instructions", "prmt", "fma".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch


def run(asm: str, inputs: Mapping[str, torch.Tensor], outputs: list[str]) -> list[torch.Tensor]:
    """Run a block over registers of 32 bits, int64 tensors of one shape: those of `outputs` when it ends."""
    registers = dict(inputs)

    def value(name: str) -> torch.Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    for instruction in asm.strip().removeprefix("{").removesuffix("}").split(";"):
        words = re.split(r"[\s,]+", instruction.strip())
        if words[0] in ("", ".reg"):
            continue
        name, target, *operands = words
        registers[target] = _result(name, [value(operand) for operand in operands])
    return [registers[name] for name in outputs]


def _result(name: str, operands: list[torch.Tensor]) -> torch.Tensor:
    if name == "mov.b32":
        return operands[0]
    if name == "and.b32":
        return operands[0] & operands[1]
    if name == "or.b32":
        return operands[0] | operands[1]
    if name == "shr.u32":
        return operands[0] >> operands[1]
    if name == "prmt.b32":
        both, selector = operands[0] | operands[1] << 32, int(operands[2])
        first, *others = [(both >> 8 * (selector >> 4 * place & 7) & 0xFF) << 8 * place for place in range(4)]
        return first | others[0] | others[1] | others[2]
    kinds = {"fma.rn.bf16x2": torch.bfloat16, "fma.rn.f16x2": torch.float16}
    factor, other, added = (halves(operand, kinds[name]).double() for operand in operands)
    return words_of((factor * other + added).to(kinds[name]))


def halves(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The two numbers in each word, the lower first: [..., 2]."""
    return torch.stack((words & 0xFFFF, words >> 16), -1).to(torch.int32).to(torch.int16).view(dtype)


def words_of(numbers: torch.Tensor) -> torch.Tensor:
    """Back again."""
    bits = numbers.view(torch.int16).long() & 0xFFFF
    return bits[..., 0] | bits[..., 1] << 16
