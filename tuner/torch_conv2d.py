"""A tuned convolution as torch.nn.functional.conv2d, for exactly what it was tuned for.

`kt apply --format python` writes this file into the modules of convolutions. torch is not needed:
any library's tensors will do, in NCHW with channels_last memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cupy_loader import Kernel
    from .cupy_tensors import Operand

_EXTRA = ("bias", "residual", "scale", "shift", "tensor_scale")


class Conv2d:
    """What a kernel computes, in conv2d's words. `operands` are NCHW; `tuned_for` names it all."""

    def __init__(
        self,
        kernel: Kernel,
        operands: Sequence[Operand],
        steps: Mapping[str, tuple[int, int]],
        groups: int,
        epilogue: str,
        tuned_for: str,
    ) -> None:
        self.kernel, self.operands, self.steps = kernel, tuple(operands), dict(steps)
        self.groups, self.epilogue, self.tuned_for = groups, epilogue, tuned_for

    def conv2d(
        self,
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        *,
        residual: Any = None,
        scale: Any = None,
        shift: Any = None,
        tensor_scale: Any = None,
        epilogue: str = "",
    ) -> Any:
        """torch.nn.functional.conv2d on channels_last tensors; the result is channels_last too.

        A kernel that fuses more than the bias is called with its `epilogue`, such as "bias+relu",
        and the operands of it: residual (as the output), scale and shift (one an output channel),
        tensor_scale (one fp32 number).
        Raises TypeError or ValueError for whatever the kernel was not tuned for.
        """
        given = {"stride": stride, "padding": padding, "dilation": dilation}
        for name, value in given.items():
            if self._pair(name, value) != self.steps[name]:
                raise self._other(f"{name}={value}")
        if groups != self.groups:
            raise self._other(f"groups={groups}")
        fused = epilogue or ("bias" if self.epilogue == "bias" else "")
        if fused != self.epilogue:
            asked = f"epilogue={epilogue!r}" if epilogue else "no epilogue"
            fuses = (
                f'pass epilogue="{self.epilogue}"' if self.epilogue else "the kernel fuses nothing"
            )
            raise self._other(f"{asked}: {fuses}")
        extra = dict(zip(_EXTRA, (bias, residual, scale, shift, tensor_scale), strict=True))
        wanted = self.epilogue.split("+")
        for name, tensor in extra.items():
            if (tensor is None) == (name in wanted):
                raise self._other(f"{'no ' if tensor is None else ''}{name}")
        inputs = [input, weight, *(extra[name] for name in _EXTRA if name in wanted)]
        try:
            return self.kernel(*inputs, views=self.operands)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error}; tuned for {self.tuned_for}") from None

    def _other(self, what: str) -> ValueError:
        return ValueError(f"conv2d with {what}: tuned for {self.tuned_for}")

    def _pair(self, name: str, value: Any) -> tuple[int, ...]:
        """What torch takes for a step: a number, one or two of them, or a kind of padding."""
        if value == "valid":
            return (0, 0)
        if value == "same":  # torch: both sides alike, or one more at the end, which is refused
            taps = self.operands[1].shape[2:]
            whole = [d * (n - 1) for d, n in zip(self.steps["dilation"], taps, strict=True)]
            unit = self.steps["stride"] == (1, 1) and not any(reach % 2 for reach in whole)
            return tuple(reach // 2 for reach in whole) if unit else ()
        values = tuple(value) if isinstance(value, tuple | list) else (value,)
        return values * 2 if len(values) == 1 else values
