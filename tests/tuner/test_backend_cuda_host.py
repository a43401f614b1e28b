"""The parent's side of a GPU's runner: which ends cost a trial, and which a process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda_kernels import gemm
from fake_cuda_runner import FakeCudaRunner

from kt.logs.record import BuildFacts, Failure, Settings, Timing
from kt.spaces.errors import KtError
from kt.spaces.kernel import Launch
from kt.spaces.target import CUDA_TARGETS
from kt.tuner.backend.build import Binary
from kt.tuner.backend.cpu import Compared, Ran
from kt.tuner.backend.cuda_host import CudaHost
from kt.tuner.backend.worker import Done, Worker

WORKLOAD = gemm()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


@pytest.fixture(scope="module")
def host(folder: Path) -> Iterator[CudaHost]:
    library = folder / "oracle.cubin"
    library.touch()
    settings = Settings(run_timeout=1.0)
    made = CudaHost(CUDA_TARGETS["h200"], settings, folder, lambda source: library)
    made._worker = Worker(FakeCudaRunner, (str(folder / "broken"),), folder / "log")
    yield made
    made.close()


def run_until(host: CudaHost, what: str, deadline: float | None) -> Ran | None:
    binary = Binary(Path(what), BuildFacts(0.1, what), 0.1, launches=(Launch("k"),))
    return host.run(binary, WORKLOAD, 0, None, deadline)


def run(host: CudaHost, what: str) -> Ran:
    ran = run_until(host, what, None)
    assert ran is not None
    return ran


def pid(host: CudaHost) -> int:
    ended = host._worker.call("pid", limit=30)
    assert isinstance(ended, Done)
    return int(ended.value)


# CUresult, the failure it means, whether the process is replaced.
CODES = (
    (700, "crash", True), (702, "crash", True), (715, "crash", True), (716, "crash", True),
    (719, "crash", True), (999, "crash", True), (709, "crash", True), (201, "crash", True),
    (46, "device_lost", True), (100, "device_lost", True), (214, "device_lost", True),
    (220, "device_lost", True), (226, "device_lost", True), (802, "device_lost", True),
    (2, "out_of_memory", False), (1, "launch_error", False), (209, "launch_error", False),
    (500, "launch_error", False),
    (701, "launch_error", False), (801, "launch_error", False), (912, "launch_error", False),
)  # fmt: skip


@pytest.mark.parametrize(("code", "kind", "replaced"), CODES)
def test_an_error_code_costs_one_trial(
    host: CudaHost, code: int, kind: str, replaced: bool
) -> None:
    before = pid(host)
    failed = run(host, f"code {code}").outcome
    assert isinstance(failed, Failure) and (failed.failure, failed.stage) == (kind, "check")
    assert isinstance(run(host, "right").outcome, Timing)
    assert (pid(host) != before) == replaced


def test_a_hang_and_a_kill_cost_one_trial(host: CudaHost) -> None:
    for what, kind, message in (
        ("hang", "run_timeout", "no result within 1 s: killed"),
        ("killed", "out_of_memory", "SIGKILL"),
    ):
        before = pid(host)
        failed = run(host, what).outcome
        assert isinstance(failed, Failure)
        assert (failed.failure, failed.stage, failed.message) == (kind, "check", message)
        assert isinstance(run(host, "right").outcome, Timing) and pid(host) != before


def test_a_run_may_end_shortly_after_its_deadline_and_none_begins_after_it(
    host: CudaHost,
) -> None:
    before = pid(host)
    assert run_until(host, "right", time.monotonic()) is None
    assert isinstance(run_until(host, "slow 0.15", time.monotonic() + 0.05), Ran)
    assert pid(host) == before
    begin = time.monotonic()
    assert run_until(host, "hang", begin + 0.1) is None
    assert 0.3 < time.monotonic() - begin < 3 and pid(host) != before


def compared(host: CudaHost, what: str, opponents: tuple[str, ...]) -> Compared:
    binary = Binary(Path(what), BuildFacts(0.1, what), 0.1, launches=(Launch("k"),))
    return host.compare((binary,), WORKLOAD, 0, 1.0, False, opponents)


def test_an_opponent_may_tune_itself_longer_than_a_kernel_may_run(
    host: CudaHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compared(host, "0", ("0.1", "1.3")).opponents.keys() == {"0.1", "1.3"}
    slow = compared(host, "1.3", ())
    assert (slow.failed, slow.failure) == (0, "run_timeout: no result within 1 s: killed")
    monkeypatch.setattr(CudaHost, "PREPARE_SECONDS", 1.0)
    with pytest.raises(KtError, match=r"'compare', opponent 1\.3: run_timeout"):
        compared(host, "0", ("1.3",))


def test_a_driver_s_error_of_no_kernel_is_one_line_and_a_new_process(host: CudaHost) -> None:
    before = pid(host)
    with pytest.raises(KtError, match=r"^cuMemAlloc failed: error 2$"):
        run(host, "nobody 2")
    assert isinstance(run(host, "right").outcome, Timing) and pid(host) != before


def test_a_device_that_is_gone_is_said_in_one_line(host: CudaHost, folder: Path) -> None:
    assert isinstance(run(host, "right").outcome, Timing)
    (folder / "broken").touch()
    failed = run(host, "code 46").outcome
    assert isinstance(failed, Failure) and failed.failure == "device_lost"
    with pytest.raises(KtError, match=r"^cuInit failed: CUDA_ERROR_NO_DEVICE$"):
        run(host, "right")
    (folder / "broken").unlink()
    assert isinstance(run(host, "right").outcome, Timing)
