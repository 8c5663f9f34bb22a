"""The disk tier when bytes change, files vanish and the system refuses: always a miss, never an exception."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_cases import NBYTES, STRIDE, FaultyFiles, blocks, leftovers, make, segments, served
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvstore.disk.files import PAGE
from kvstore.disk.tier import DiskTier
from kvstore.record import HEADER_NBYTES


def stored(directory: Path) -> tuple[DiskTier, Path]:
    """Return a tier with one segment of four blocks, and the segment."""
    tier = make(directory)
    assert tier.write(blocks(1, 4), 0.0) == 4
    return tier, segments(tier)[0]


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Change one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("part", ["header", "payload"])
def test_a_flipped_bit_ends_the_prefix_before_it(tmp_path: Path, part: str, restart: bool) -> None:
    """Anywhere in header or payload of any record; the block is dropped, the ones before it are served."""
    draw = random.Random(5)
    for trial in range(60):
        tier, path = stored(tmp_path / str(trial))
        record = draw.randrange(4)
        within = draw.randrange(HEADER_NBYTES) if part == "header" else HEADER_NBYTES + draw.randrange(NBYTES)
        flip(path, record * STRIDE + within, draw.randrange(8))
        if restart:
            tier.close()
            tier = make(tmp_path / str(trial), "e2")

        assert served(tier, 1, 4) == record
        assert served(tier, 1, 4) == record
        tier.check_integrity()

        counts = tier.statistics()
        assert counts["corrupt_total"] + counts["dropped_total"] == 1
        assert tier.health.ok
        assert tier.write(blocks(1, 4), 0.0) == 1  # a good copy takes its place
        assert served(tier, 1, 4) == 4
        tier.close()


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
def test_a_cut_segment_serves_what_is_left_of_it(tmp_path: Path, restart: bool) -> None:
    """At every region: nothing, within a header, between header and payload, within a payload, between records."""
    lengths = [record * STRIDE + within for record in range(4) for within in (0, 1, 100, 255, 256, 257, STRIDE - 1)]
    for length in lengths:
        tier, path = stored(tmp_path / str(length))
        with path.open("r+b") as file:
            file.truncate(length)
        if restart:
            tier.close()
            tier = make(tmp_path / str(length), "e2")

        assert served(tier, 1, 4) == length // STRIDE
        tier.check_integrity()
        tier.close()


def test_a_good_copy_is_found_after_a_restart_not_the_bad_one_before_it(tmp_path: Path) -> None:
    """What was found to be bad is taken out of its file; of two copies the later one counts."""
    tier, path = stored(tmp_path)
    flip(path, STRIDE + HEADER_NBYTES)
    assert served(tier, 1, 4) == 1 and tier.write(blocks(1, 4), 0.0) == 1
    tier.close()
    tier = make(tmp_path, "e2")
    assert served(tier, 1, 4) == 4 and tier.statistics()["dropped_total"] == 0
    tier.close()

    data = bytearray(segments(tier)[0].read_bytes())
    data[STRIDE : 2 * STRIDE] = segments(tier)[1].read_bytes()
    data[2 * STRIDE - 1] ^= 1  # the bad copy is there once more
    segments(tier)[0].write_bytes(data)
    tier = make(tmp_path, "e3")
    assert served(tier, 1, 4) == 4
    tier.check_integrity()


def test_a_segment_of_no_bytes_is_removed_at_the_start(tmp_path: Path) -> None:
    """There is nothing to find in it."""
    tier, path = stored(tmp_path)
    tier.close()
    path.write_bytes(b"")

    again = make(tmp_path, "e2")

    assert segments(again) == [] and served(again, 1, 4) == 0
    again.check_integrity()


def test_a_segment_of_noise_is_removed_at_the_start(tmp_path: Path) -> None:
    """It holds no header."""
    tier, path = stored(tmp_path)
    tier.close()
    path.write_bytes(random.Random(1).randbytes(3 * STRIDE + 17))

    again = make(tmp_path, "e2")

    assert segments(again) == [] and again.statistics()["dropped_total"] == 4


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    """Whatever lies in the directory under other names stays; a link is not followed."""
    tier, path = stored(tmp_path)
    tier.close()
    (tmp_path / "notes.txt").write_text("mine")
    (tier.folder / "segment-1").write_text("not ours")
    (tier.folder / "segment-000000000009-e9").symlink_to(path)
    (tier.folder / "segment-000000000008-e9").mkdir()

    again = make(tmp_path, "e2")

    assert served(again, 1, 4) == 4
    again.check_integrity()
    left = {p.name for p in tier.folder.iterdir()} | {p.name for p in tmp_path.iterdir()}
    assert {"notes.txt", "segment-1", "segment-000000000009-e9", "segment-000000000008-e9"} <= left


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
def test_swapped_records_are_never_taken_for_one_another(tmp_path: Path, restart: bool) -> None:
    """A sound record in another's place is a miss; a restart finds both where they now lie."""
    tier, path = stored(tmp_path)
    data = path.read_bytes()
    records = [data[i * STRIDE : (i + 1) * STRIDE] for i in range(4)]
    path.write_bytes(b"".join([records[0], records[2], records[1], records[3]]))
    if restart:
        tier.close()
        tier = make(tmp_path, "e2")

    assert served(tier, 1, 4) == (4 if restart else 1)
    tier.check_integrity()


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
def test_swapped_payloads_are_never_taken_for_one_another(tmp_path: Path, restart: bool) -> None:
    """Each header is right, what follows is another block's."""
    tier, path = stored(tmp_path)
    data = bytearray(path.read_bytes())
    one, two = (slice(i * STRIDE + HEADER_NBYTES, (i + 1) * STRIDE) for i in (1, 2))
    data[one], data[two] = data[two], data[one]
    path.write_bytes(data)
    if restart:
        tier.close()
        tier = make(tmp_path, "e2")

    assert served(tier, 1, 4) == 1
    tier.check_integrity()


def test_a_short_read_is_seen(tmp_path: Path) -> None:
    """Whatever bytes happen to lie in the rest of the buffer: what counts is what the system says it has read."""
    for got in range(0, 4 * STRIDE, 97):
        files = FaultyFiles()
        tier = make(tmp_path / str(got), files=files)
        tier.write(blocks(1, 4), 0.0)
        files.fail("read", lambda result, got=got: got)

        assert served(tier, 1, 4) == got // STRIDE
        tier.check_integrity()
        tier.close()


def test_a_short_write_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """In the middle of a header or a payload."""
    files = FaultyFiles()
    tier = make(tmp_path, files=files)
    files.fail("write", lambda wanted: 100, lambda wanted: 200, lambda wanted: 1, None, lambda wanted: STRIDE - 1)

    assert tier.write(blocks(1, 4), 0.0) == 4
    assert served(tier, 1, 4) == 4


FAULTS = [
    ("create", 0, errno.EMFILE), ("rename", 0, errno.EIO), ("sync", 0, errno.EIO),
    ("write", 0, errno.EROFS), ("write", 1, errno.EIO), ("write", 3, errno.EDQUOT), ("write", 2, errno.EFBIG),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "passed", "code"), FAULTS)
def test_a_refused_write_leaves_no_trace_and_is_tried_again_after_a_pause(
    tmp_path: Path, operation: str, passed: int, code: int
) -> None:
    """At any step: no file, no entry, no exception; the tier says what is wrong, and recovers by itself."""
    files = FaultyFiles()
    tier = make(tmp_path, files=files, sync=True)
    tier.write(blocks(1, 2), 0.0)
    if operation == "write":
        files.fail(operation, *[None] * passed, lambda wanted: wanted // 2)
    files.fail(operation, code)

    assert tier.write(blocks(2, 4), 10.0) == 0
    assert leftovers(tier) == []
    assert tier.statistics()["errno"] == code and tier.statistics()["failed_writes_total"] == 1
    assert tier.health.reason and str(tmp_path) not in tier.health.reason
    tier.check_integrity()
    assert tier.write(blocks(3, 2), 10.5) == 0 and served(tier, 2, 4) == 0

    assert not tier.probe(10.9) and tier.probe(11.0)
    assert tier.write(blocks(2, 4), 11.0) == 4 and served(tier, 2, 4) == 4
    tier.check_integrity()


@pytest.mark.slow
def test_a_thousand_failed_writes_leave_the_account_right(tmp_path: Path) -> None:
    """Refused at every step, for every reason, cut short or full: what is counted is what lies on the disk."""
    files = FaultyFiles()
    tier = make(tmp_path, files=files, sync=True)
    rng, now = random.Random(5), 0.0
    tier.write(blocks(0, 3), now)
    failed = 0
    while failed < 1000:
        operation, passed, code = rng.choice(FAULTS)
        if operation == "write":
            files.fail(operation, *[None] * passed, lambda wanted: wanted // 2)
        files.fail(operation, code)
        name = rng.randrange(1, 1 << 20)
        assert tier.write(blocks(name, 4), now) == 0 and served(tier, name, 4, now) == 0
        failed += 1
        now += 100.0
        assert tier.probe(now)
        if failed % 10 == 0:
            assert tier.write(blocks(name, 4), now) == 4 and served(tier, name, 4, now) == 4
        tier.check_integrity()
    on_disk = sum(path.stat().st_blocks * 512 for path in segments(tier))
    assert tier.statistics()["failed_writes_total"] == 1000 and tier.statistics()["nbytes"] == on_disk
    assert leftovers(tier) == []


def test_a_write_that_makes_no_progress_ends(tmp_path: Path) -> None:
    """A system that takes no bytes and says nothing is treated as broken."""
    files = FaultyFiles()
    tier = make(tmp_path, files=files)
    files.fail("write", lambda wanted: 0)

    assert tier.write(blocks(1, 2), 0.0) == 0
    assert not tier.health.ok and leftovers(tier) == []


def test_a_full_disk_makes_the_cache_give_way(tmp_path: Path) -> None:
    """What is stored least worthily goes, so that new blocks have a chance beside whatever fills the disk."""
    files = FaultyFiles()
    tier = make(tmp_path, files=files)
    tier.write(blocks(1, 2), 0.0)
    tier.write(blocks(2, 2), 0.0)
    files.fail("write", errno.ENOSPC)

    tier.write(blocks(3, 2), 0.0)

    assert [served(tier, name, 2) for name in (1, 2, 3)] == [0, 2, 0]
    tier.check_integrity()


def test_a_refused_read_is_a_miss_and_shows(tmp_path: Path) -> None:
    """The block is forgotten until the directory has been looked through again."""
    files = FaultyFiles()
    tier = make(tmp_path, files=files)
    tier.write(blocks(1, 2), 0.0)
    for operation in ("read", "open"):
        files.fail(operation, errno.EIO)

        assert served(tier, 1, 2, now=5.0) == 0
        assert tier.statistics()["errno"] == errno.EIO
        assert tier.probe(100.0) and served(tier, 1, 2) == 2
        tier.check_integrity()


def test_a_self_test_that_reads_other_bytes_keeps_the_tier_off(tmp_path: Path) -> None:
    """A disk that says yes to everything is found out before it is used."""

    class Liar(FaultyFiles):
        def read(self, fd: int, buffers: object, offset: int) -> int:
            got = super().read(fd, buffers, offset)  # type: ignore[arg-type]
            buffers[0][0] ^= 1  # type: ignore[index]
            return got

    tier = make(tmp_path, files=Liar())

    assert not tier.health.ok and tier.write(blocks(1, 2), 0.0) == 0
    assert leftovers(tier) == []


def test_a_directory_that_vanishes_is_made_again(tmp_path: Path) -> None:
    """Nothing is served from what is gone; after a pause the tier starts over, with a lock that holds."""
    directory = tmp_path / "kv"
    for gone in (directory, None):
        tier = make(directory)
        tier.write(blocks(1, 2), 0.0)
        shutil.rmtree(gone or tier.folder)

        assert served(tier, 1, 2) == 0 and tier.write(blocks(2, 2), 0.0) == 0
        assert not tier.health.ok

        assert tier.probe(100.0)
        assert tier.write(blocks(3, 2), 100.0) == 2 and served(tier, 3, 2) == 2 and served(tier, 1, 2) == 0
        tier.check_integrity()
        tier.close()
        shutil.rmtree(directory)


def test_reads_that_fail_do_not_put_the_next_look_off(tmp_path: Path) -> None:
    """Under traffic a directory that vanished is made again after the first pause, not once nobody asks any more."""
    tier = make(tmp_path / "kv")
    for name in range(1, 6):
        tier.write(blocks(name, 2), 0.0)
    shutil.rmtree(tmp_path / "kv")

    for name in range(1, 6):
        assert served(tier, name, 2, now=name * 0.1) == 0

    assert tier.statistics()["failed_reads_total"] == 5 and not tier.probe(1.0)
    assert tier.probe(1.1) and tier.write(blocks(1, 2), 1.1) == 2 and served(tier, 1, 2) == 2
    tier.check_integrity()


def test_a_place_where_nothing_can_be_made_leaves_the_tier_off(tmp_path: Path) -> None:
    """A file stands where the directory should be: no exception, and a reason."""
    (tmp_path / "kv").write_text("")

    tier = make(tmp_path / "kv")

    assert tier.statistics()["errno"] in (errno.EEXIST, errno.ENOTDIR)
    assert tier.write(blocks(1, 2), 0.0) == 0 and served(tier, 1, 2) == 0 and not tier.probe(100.0)
    (tmp_path / "kv").unlink()
    assert tier.probe(1000.0) and tier.write(blocks(1, 2), 1000.0) == 2


def test_a_file_that_cannot_be_removed_still_counts(tmp_path: Path) -> None:
    """Room is given for what is gone, not for what should be."""
    files = FaultyFiles()
    tier = make(tmp_path, files=files, max_nbytes=5 * PAGE)
    tier.write(blocks(1, 8), 0.0)
    files.fail("unlink", errno.EIO)

    assert tier.write(blocks(2, 16), 0.0) == 0
    assert len(segments(tier)) == 1
    tier.check_integrity()
    assert tier.write(blocks(2, 16), 0.0) == 16 and len(segments(tier)) == 1


def test_without_verification_wrong_bytes_would_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So these tests can fail."""
    tier, path = stored(tmp_path)
    flip(path, HEADER_NBYTES + 3)
    monkeypatch.setattr("kvstore.disk.reader._verified", lambda *_: True)

    with pytest.raises(AssertionError, match="block 0 has wrong bytes"):
        served(tier, 1, 4)


OPERATIONS = ("create", "open", "write", "read", "rename", "unlink", "sync")


class Disk(RuleBasedStateMachine):
    """Random writes, reads, faults, damage, restarts: what is served is always what was stored, and all adds up."""

    directory: Path
    run = 0

    def __init__(self) -> None:
        super().__init__()
        Disk.run += 1
        self.place = self.directory / str(Disk.run)
        self.files = FaultyFiles()
        self.epoch = 0
        self.now = 0.0
        self.start()

    def start(self) -> None:
        """Open the next incarnation."""
        self.epoch += 1
        self.tier = make(
            self.place, f"e{self.epoch}", now=self.now, files=self.files, max_nbytes=12 * PAGE, sync=self.epoch % 2 == 0
        )

    @rule(name=st.integers(1, 6), length=st.integers(1, 8))
    def write(self, name: int, length: int) -> None:
        """A batch."""
        assert 0 <= self.tier.write(blocks(name, length), self.now) <= length

    @rule(name=st.integers(1, 6))
    def read(self, name: int) -> None:
        """A chain; its bytes are compared in `served`."""
        served(self.tier, name, 8, self.now)

    @rule(
        operation=st.sampled_from(OPERATIONS),
        after=st.integers(0, 3),
        code=st.sampled_from((errno.EIO, errno.ENOSPC, errno.EROFS, errno.ENOENT)),
        short=st.integers(0, 3 * STRIDE),
    )
    def break_something(self, operation: str, after: int, code: int, short: int) -> None:
        """One of the next calls is refused, or does less than it was asked for."""
        less: Callable[[int], int] = lambda full: min(full, short)  # noqa: E731 (a value among others)
        self.files.fail(operation, *[None] * after, less if operation in ("read", "write") and short % 2 else code)

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """A bit, an end, or the whole of a segment changes under the tier."""
        paths = segments(self.tier)
        if not paths:
            return
        path = data.draw(st.sampled_from(paths))
        size = path.stat().st_size
        match data.draw(st.sampled_from(("flip", "cut", "gone"))):
            case "flip" if size:
                flip(path, data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7)))
            case "cut":
                with path.open("r+b") as file:
                    file.truncate(data.draw(st.integers(0, size)))
            case "gone":
                path.unlink()
            case _:
                pass

    @rule(seconds=st.integers(1, 200))
    def pass_time(self, seconds: int) -> None:
        """Leases end, probes are due."""
        self.now += seconds
        self.tier.expire(self.now)
        self.tier.probe(self.now)

    @rule()
    def restart(self) -> None:
        """Another incarnation."""
        self.tier.close()
        self.start()

    @invariant()
    def balances(self) -> None:
        """Records, segments, pins and bytes add up; nobody reads any more."""
        self.tier._catalog.check_integrity()  # files are compared at the end, when none is damaged any more
        assert self.tier.statistics()["reads"] == 0

    def teardown(self) -> None:
        """With a disk that works again, everything works again."""
        self.files.clear()
        self.tier.close()
        self.start()
        assert self.tier.health.ok
        self.tier.check_integrity()
        for name in range(1, 7):
            served(self.tier, name, 8, self.now)
        fresh = blocks(99, 2)
        assert self.tier.write(fresh, self.now) == 2 and served(self.tier, 99, 2) == 2
        self.tier.check_integrity()
        self.tier.close()
        shutil.rmtree(self.place)


@pytest.mark.slow
def test_no_order_of_faults_serves_wrong_bytes(tmp_path: Path) -> None:
    """Whatever happens, a read returns the block's own bytes or nothing, and the ledger balances."""
    Disk.directory = tmp_path
    run_state_machine_as_test(
        Disk,
        settings=settings(
            max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
