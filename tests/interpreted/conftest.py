"""What Triton's interpreter gets wrong, put right."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def conditions_stay_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A condition that all rows of a block share is one for each: in triton 3.9 it comes out as numbers."""
    if importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    splat = InterpreterBuilder.create_splat

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        if arg.data.dtype == np.bool_:
            return TensorHandle(np.full(ret_ty.shape, arg.data, dtype=np.bool_), tl.int1)
        return splat(self, ret_ty, arg)

    monkeypatch.setattr(InterpreterBuilder, "create_splat", create_splat)
