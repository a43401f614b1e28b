"""PTX of a CUDA source, to look at its instructions."""

from __future__ import annotations


def ptx_of(source: str, arch: str) -> str:
    """The PTX that NVRTC makes of `source` for `arch` (`compute_80` …)."""
    from kt.tuner.backend.nvrtc import OPTIONS, _library

    nvrtc = _library()
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, None, None)
    options = [f"--gpu-architecture={arch}".encode(), *(o.encode() for o in OPTIONS)]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert int(code) == 0
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = bytearray(size)
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode()
