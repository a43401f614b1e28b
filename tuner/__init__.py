"""How it is found: search, build, run, pools and commands.

`tune` and `apply` are the Python interface:

    from kt.tuner import apply, tune

    result = tune("gemm 512x512x512 dtype=fp32", trials=64, log="kt-logs")
    source = apply(result.log)
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import tune as tune
    from .apply import apply as apply

__all__ = ["apply", "tune"]


class _Package(ModuleType):
    """Loads the two functions when asked for, and keeps their names from the modules of that name.

    Importing `kt.tuner.tune` would otherwise replace the function by the module.
    """

    @property
    def tune(self) -> Any:
        from .api import tune

        return tune

    @tune.setter
    def tune(self, module: ModuleType) -> None:
        pass

    @property
    def apply(self) -> Any:
        from .apply import apply

        return apply

    @apply.setter
    def apply(self, module: ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _Package
