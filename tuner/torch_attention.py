"""A tuned attention as torch's scaled_dot_product_attention, for exactly what it was tuned for.

`kt apply --format python` writes this file into the modules of attentions. torch is not needed: any
library's tensors will do, in the order [B, H, S, D].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cupy_loader import Kernel
    from .cupy_tensors import Operand


class Attention:
    """What a kernel computes, in torch's words. `operands` are [B, H, S, D] to the caller."""

    def __init__(
        self,
        kernel: Kernel,
        operands: Sequence[Operand],
        causal: bool,
        window: int,
        scale: float,
        softcap: float,
        tuned_for: str,
    ) -> None:
        self.kernel, self.operands = kernel, tuple(operands)
        self.causal, self.scale, self.tuned_for = causal, scale, tuned_for
        query, key = (operand.shape for operand in self.operands[:2])
        self.grouped = query[1] != key[1]
        self.unlike = self._unlike(query[2], key[2], window, softcap)

    def _unlike(self, queries: int, keys: int, window: int, softcap: float) -> str:
        """What of the kernel scaled_dot_product_attention has no words for."""
        if self.causal and queries != keys:
            return (
                f"for {queries} queries and {keys} keys torch aligns a causal mask at the top "
                "left, the kernel at the bottom right"
            )
        if window and window < keys:
            return f"the kernel has a window of {window} keys"
        return f"the kernel caps logits at {softcap:g}" if softcap else ""

    def scaled_dot_product_attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """torch.nn.functional.scaled_dot_product_attention on tensors [B, H, S, D].

        Tensors of a kernel tuned for `layout=bshd` are transposed views: `x.transpose(1, 2)` of
        each is contiguous, and so it is of the result. Where torch and the kernel agree no query
        sees nothing; launch() gives such a row zeros, where torch gives NaN or zeros by backend.
        As in torch there is one result; the lse of a kernel that has it, float [B, H, S] whatever
        the element type, is the second of launch().
        Raises TypeError or ValueError for whatever the kernel was not tuned for.
        """
        if self.unlike:
            raise self._other(f"{self.unlike}, so use launch()")
        if attn_mask is not None:
            raise self._other("attn_mask")
        if dropout_p:
            raise self._other(f"dropout_p={dropout_p}")
        if bool(is_causal) != self.causal:
            raise self._other(f"is_causal={bool(is_causal)}")
        if self.grouped and not enable_gqa:
            raise self._other("enable_gqa=False")
        given = 1 / math.sqrt(self.operands[0].shape[3]) if scale is None else scale
        if not math.isclose(given, self.scale, rel_tol=1e-6):
            raise self._other(f"scale={given:g}")
        try:
            found = self.kernel(query, key, value, views=self.operands)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error}; tuned for {self.tuned_for}") from None
        return found[0] if isinstance(found, tuple) else found

    def _other(self, what: str) -> ValueError:
        return ValueError(f"scaled_dot_product_attention: {what}; tuned for {self.tuned_for}")
