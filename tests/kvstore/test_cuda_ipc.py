"""Pools on a CUDA device behind handles: everything but the device, whose few calls are made on plain memory here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore import cuda_ipc
from kvstore.cuda_ipc import KIND, LABEL_NBYTES, Address, AttachedCuda, CudaMemory, default_runtime
from kvstore.errors import LayoutMismatch, PoolGone, TransferAborted, TransferCorrupt
from kvstore.exports import close_devices, copy_exported, open_pool
from kvstore.handoff import checksum
from kvstore.pool import BlockPool
from schemas.messages import BlockRef, PoolHandle

NBYTES, BLOCKS = 512, 8


class PlainMemory:
    """Allocations in this process under made-up addresses, as one driver that all processes share."""

    def __init__(self, bus_id: str = "0000:65:00.0") -> None:
        self.bus_id = bus_id
        self.memory: dict[int, bytearray] = {}
        self.opened: list[int] = []
        self.broken = ""  # the call that fails
        self._next = 1 << 20

    def _may(self, call: str) -> None:
        if self.broken == call:
            raise OSError(f"{call} failed: an illegal memory access was encountered")

    def device(self) -> str:
        return self.bus_id

    def allocate(self, nbytes: int) -> int:
        self._may("allocate")
        free = [base for base, memory in self.memory.items() if not memory]
        base = free[0] if free else self._next  # as a driver does: freed addresses come back
        self._next += 0 if free else 1 << 20
        self.memory[base] = bytearray(nbytes)
        return base

    def free(self, address: int) -> None:
        self.memory[address] = bytearray()

    def export(self, base: int) -> bytes:
        self._may("export")
        assert base in self.memory, "no base of an allocation"
        return base.to_bytes(8, "little") + bytes(56)

    def open(self, handle: bytes) -> int:
        self._may("open")
        base = int.from_bytes(handle[:8], "little")
        if not self.memory.get(base):
            raise OSError("invalid resource handle")
        self.opened.append(base)
        return base

    def close(self, base: int) -> None:
        self.opened.remove(base)

    def _find(self, address: int, nbytes: int) -> tuple[bytearray, int]:
        base = max(b for b in self.memory if b <= address)
        if address - base + nbytes > len(self.memory[base]):
            raise OSError("an illegal memory access was encountered")
        return self.memory[base], address - base

    def read(self, address: int, nbytes: int) -> bytes:
        self._may("read")
        memory, at = self._find(address, nbytes)
        return bytes(memory[at : at + nbytes])

    def write(self, address: int, data: bytes | memoryview) -> None:
        self._may("write")
        memory, at = self._find(address, len(data))
        memory[at : at + len(data)] = data

    def move(self, source: int, dest: int, nbytes: int) -> None:
        self._may("move")
        self.write(dest, self.read(source, nbytes))


@pytest.fixture
def runtime() -> Iterator[PlainMemory]:
    """The driver; nothing of it stays open."""
    close_devices()
    made = PlainMemory()
    yield made
    made.broken = ""
    close_devices()


def memory(runtime: PlainMemory, epoch: str = "e1", generation: int = 1, layout: str = "l") -> CudaMemory:
    """A pool that its owner exports, with a different byte in each block."""
    made = CudaMemory(NBYTES * BLOCKS, NBYTES, layout, epoch, "h", generation, runtime)
    runtime.write(made.address, b"".join(bytes([b + 1]) * NBYTES for b in range(BLOCKS)))
    return made


def refs(*indices: int) -> list[BlockRef]:
    """References to these blocks."""
    return [BlockRef(index=i, generation=1) for i in indices]


# --- handles ---------------------------------------------------------------------------------------


def test_an_address_is_read_as_it_was_written() -> None:
    """One word, in a field that every handle has."""
    address = Address("0000:65:00.0", bytes(range(64)), 1 << 30, 4096, 7)

    assert Address.parse(address.text()) == address
    assert " " not in address.text() and len(address.text()) < 200


@pytest.mark.parametrize(
    "text", ["", "/dev/shm/headrace-x", "v1/0/1/2/3/abc", "v1//9/0/1/" + "00" * 64, "v2/d/9/0/1/" + "00" * 64,
             "v1/d/-9/0/1/" + "00" * 64, "v1/d/9/0/1/" + "00" * 63, "v1/d/9/0/1/" + "zz" * 64, "v1/d/9/0/" + "00" * 64]
)  # fmt: skip
def test_anything_else_is_no_address(text: str) -> None:
    """Damaged, of another version, or of another kind."""
    with pytest.raises(ValueError):
        Address.parse(text)


def test_what_is_exported_is_the_base_of_an_allocation_of_its_own(runtime: PlainMemory) -> None:
    """Never a slice of something larger: opening the handle shows this pool's bytes and its label, nothing else."""
    pool = memory(runtime)

    where = Address.parse(pool.handle().path)

    assert (pool.handle().kind, where.offset, where.device) == (KIND, 0, runtime.bus_id)
    assert where.base_nbytes == NBYTES * BLOCKS + LABEL_NBYTES == len(runtime.memory[pool.address])


def test_another_process_reads_and_writes_the_same_blocks(runtime: PlainMemory) -> None:
    """Through a handle that has travelled as bytes."""
    pool = memory(runtime)
    handle = PoolHandle.model_validate_json(pool.handle().model_dump_json())

    other = AttachedCuda(handle, runtime)
    other.write(2, b"\x99" * NBYTES)

    assert other.num_blocks == BLOCKS and other.present()
    assert other.read([1, 2]) == [b"\x02" * NBYTES, b"\x99" * NBYTES]
    assert runtime.read(pool.address + 2 * NBYTES, NBYTES) == b"\x99" * NBYTES
    for bad in (-1, BLOCKS):
        with pytest.raises(ValueError, match="outside"):
            other.write(bad, b"\x00" * NBYTES)
    with pytest.raises(ValueError, match="for a block of"):
        other.write(0, b"\x00")
    other.close()
    other.close()
    assert runtime.opened == []


def test_a_stale_handle_is_refused(runtime: PlainMemory) -> None:
    """Freed memory; the same address given out again under a new generation, epoch, or layout."""
    pool = memory(runtime)
    stale = pool.handle()
    attached = AttachedCuda(stale, runtime)
    assert attached.present()
    pool.close()

    with pytest.raises(PoolGone, match="invalid resource handle"):
        AttachedCuda(stale, runtime)
    for fields in ({"generation": 2}, {"epoch": "e2"}, {"layout": "other"}):
        again = memory(runtime, **fields)  # type: ignore[arg-type]
        assert Address.parse(again.handle().path).base == Address.parse(stale.path).base
        assert not attached.present()
        with pytest.raises(PoolGone, match="another owner, another generation"):
            AttachedCuda(stale, runtime)
        AttachedCuda(again.handle(), runtime).close()
        again.close()
    attached.close()
    assert runtime.opened == []


def test_a_handle_that_reaches_beyond_its_allocation_is_refused(runtime: PlainMemory) -> None:
    """Nothing is opened for it."""
    handle = memory(runtime).handle()

    for change in ({"nbytes": handle.nbytes + NBYTES}, {"path": "v1/x"}, {"kind": "shm"}):
        with pytest.raises(PoolGone):
            AttachedCuda(handle.model_copy(update=change), runtime)
    assert runtime.opened == []


@pytest.mark.parametrize("call", ["allocate", "export", "write"])
def test_an_owner_that_cannot_export_leaves_nothing_behind(runtime: PlainMemory, call: str) -> None:
    """Out of memory, or a device that fails."""
    runtime.broken = call

    with pytest.raises(OSError, match="failed"):
        CudaMemory(NBYTES, NBYTES, "l", "e1", "h", 1, runtime)
    assert not any(runtime.memory.values())


def test_sizes_that_make_no_pool_are_refused(runtime: PlainMemory) -> None:
    """Before anything is allocated."""
    for nbytes, block in ((0, 4), (6, 4), (4, 0), (4, -4)):
        with pytest.raises(ValueError, match="bytes for blocks"):
            CudaMemory(nbytes, block, "l", "e1", "h", 1, runtime)
    assert not runtime.memory


# --- one interface ---------------------------------------------------------------------------------


def test_without_cupy_or_a_device_the_reason_is_told(runtime: PlainMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle of such a pool is a pool that is not there: a miss, no crash, and no import before it is needed."""
    handle = memory(runtime).handle()
    try:
        import cupy

        if cupy.cuda.is_available():
            pytest.skip("there is a device")
    except ImportError:
        pass
    monkeypatch.setattr(cuda_ipc, "_runtime", None)

    with pytest.raises(OSError, match=r"CuPy is not installed|no CUDA device|CUDA"):
        default_runtime()
    with pytest.raises(PoolGone, match=r"CuPy is not installed|CUDA"):
        open_pool(handle)


@pytest.fixture
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockPool]:
    """A pool in shared memory."""
    pool = BlockPool.create(tmp_path_factory.mktemp("pools"), "a", BLOCKS, NBYTES, "l", "e9", "h")
    pool.view()[:] = b"".join(bytes([b + 101]) * NBYTES for b in range(BLOCKS))
    yield pool
    pool.close()


@pytest.fixture
def driver(runtime: PlainMemory, monkeypatch: pytest.MonkeyPatch) -> PlainMemory:
    """The driver that `open_pool` finds."""
    monkeypatch.setattr(cuda_ipc, "_runtime", runtime)
    return runtime


def test_a_pool_is_opened_by_its_kind(driver: PlainMemory, host: BlockPool) -> None:
    """And an unknown kind is refused."""
    assert open_pool(host.handle()).num_blocks == BLOCKS
    device = memory(driver)
    opened = open_pool(device.handle())
    assert isinstance(opened, AttachedCuda) and open_pool(device.handle()) is opened
    device.close()
    with pytest.raises(PoolGone):
        open_pool(device.handle())
    with pytest.raises(PoolGone, match="kind"):
        open_pool(host.handle().model_copy(update={"kind": "carrier-pigeon"}))


def test_blocks_move_between_all_kinds_with_the_same_checksums(driver: PlainMemory, host: BlockPool) -> None:
    """Host to device, device to device, device to host: bytes and checksums of the source each time."""
    first, second = (open_pool(memory(driver, epoch).handle()) for epoch in ("e1", "e2"))
    wanted = [bytes([b + 101]) * NBYTES for b in (3, 4, 0)]
    sums = [checksum(memoryview(data)) for data in wanted]
    whole = open_pool(host.handle())

    def copy(source: object, from_: list[BlockRef], dest: object, to: list[BlockRef]) -> list[int]:
        return copy_exported(source, from_, dest, to, should_stop=lambda: False)  # type: ignore[arg-type]

    assert copy(whole, refs(3, 4, 0), first, refs(1, 2, 7)) == sums
    assert copy(first, refs(1, 2, 7), second, refs(5, 6, 4)) == sums
    host.view()[:] = bytes(len(host.view()))
    assert copy(second, refs(5, 6, 4), whole, refs(0, 1, 2)) == sums

    assert host.view()[: 3 * NBYTES] == b"".join(wanted)
    assert isinstance(first, AttachedCuda) and first.read([0, 3]) == [bytes([1]) * NBYTES, bytes([4]) * NBYTES]


def test_copies_with_a_device_fail_as_copies_in_memory_do(
    driver: PlainMemory, host: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, damaged on the way, other layouts, places outside, a device that fails: typed, and each a miss."""
    device, whole = open_pool(memory(driver).handle()), open_pool(host.handle())
    other = open_pool(memory(driver, "e3", layout="other").handle())

    with pytest.raises(TransferAborted):
        copy_exported(whole, refs(0), device, refs(0), should_stop=lambda: True)
    with pytest.raises(LayoutMismatch):
        copy_exported(whole, refs(0), other, refs(0), should_stop=lambda: False)
    with pytest.raises(ValueError, match="outside"):
        copy_exported(device, refs(BLOCKS), whole, refs(0), should_stop=lambda: False)
    with pytest.raises(ValueError, match="1 destination"):
        copy_exported(device, refs(0, 1), whole, refs(0), should_stop=lambda: False)
    driver.broken = "read"
    with pytest.raises(OSError, match="read failed"):
        copy_exported(device, refs(0), whole, refs(0), should_stop=lambda: False)
    driver.broken = ""
    monkeypatch.setattr(driver, "write", lambda address, data: None)  # lost on the way
    with pytest.raises(TransferCorrupt):
        copy_exported(whole, refs(0), device, refs(3), should_stop=lambda: False)
