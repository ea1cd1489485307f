"""The file of stored responses: several processes, restarts, kills, bounds, and what is no such file."""

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_jax.cli import serve
from dflash_jax.errors import InputError
from dflash_jax.server import response_store, supervisor
from dflash_jax.server.errors import ApiError
from dflash_jax.server.response_store import APPLICATION, VERSION, ResponseStore, StoredResponse
from tests.server.conftest import wait_until

ENTRY = StoredResponse(b'{"output":[]}', b'{"id":"1"}\n{"id":"2"}')
# Stores an entry for each line that it reads, and says which are stored.
WRITER = """
import asyncio, sys
from dflash_jax.server.response_store import ResponseStore, StoredResponse

async def write(path, owner, nbytes):
    store = ResponseStore(10**6, path=path)
    for i, _ in enumerate(sys.stdin):
        assert await store.put(owner.encode(), str(i), StoredResponse(b"%d" % (i % 10) * nbytes, b"x"))
        print(i, flush=True)

asyncio.run(write(*sys.argv[1:3], int(sys.argv[3])))
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "responses.sqlite"


@pytest.fixture
def opened(path):
    """Opens the file, and closes it after the test."""
    stores = []

    def use(*args, **options) -> ResponseStore:
        stores.append(ResponseStore(*args, path=path, **options))
        return stores[-1]

    yield use
    for store in stores:
        store.close()


def run(work):
    return asyncio.run(work)


def check(path):
    """Checks that the file is not corrupt and that the stored sums equal those of the entries."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        sums = "SELECT client, entries, nbytes FROM clients WHERE client != x'' ORDER BY client"
        counted = "SELECT client, count(*), sum(nbytes) FROM entries GROUP BY client ORDER BY client"
        assert connection.execute(sums).fetchall() == connection.execute(counted).fetchall()
        total = connection.execute("SELECT entries, nbytes FROM clients WHERE client = x''").fetchall()
        assert total == connection.execute("SELECT count(*), sum(nbytes) FROM entries").fetchall()
        sizes = "SELECT number, {} FROM {} ORDER BY number"
        contents = connection.execute(sizes.format("length(content)", "contents")).fetchall()
        assert contents == connection.execute(sizes.format("nbytes", "entries")).fetchall()


def test_a_restart_keeps_responses_in_a_private_file(path, opened):
    store = opened()
    assert run(store.put(b"owner", "resp_1", ENTRY))
    assert {name.stat().st_mode & 0o777 for name in path.parent.iterdir()} == {0o600}
    store.close()
    again = opened()
    assert run(again.get(b"owner", "resp_1")) == ENTRY
    assert run(again.get(b"other", "resp_1")) is None
    assert not run(again.put(b"owner", "resp_1", StoredResponse(b"", b"")))
    assert run(again.get(b"owner", "resp_1")) == ENTRY
    check(path)


@pytest.mark.parametrize("ends", ["close", "garbage"])
def test_a_temporary_file_is_private_and_ends_with_its_store(ends):
    store = ResponseStore()
    assert run(store.put(b"owner", "resp_1", ENTRY))
    folder = store.path.parent
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert {os.stat(f"{folder}/{name}").st_mode & 0o777 for name in os.listdir(folder)} == {0o600}
    if ends == "close":
        store.close()
    # Its thread may still have the last write.
    del store
    assert wait_until(lambda: not os.path.exists(folder))


def test_a_store_of_no_entries_has_no_file_and_stores_nothing():
    nothing = ResponseStore(0)
    assert not run(nothing.put(b"k", "a", ENTRY))
    assert run(nothing.get(b"k", "a")) is None
    assert not run(nothing.delete(b"k", "a"))
    assert nothing.path is None


def test_what_one_process_seals_others_and_later_ones_read(path, opened):
    """Also those without entries: the file has the key."""
    first = opened()
    sealed = first.seal(b"owner", "reasoning", "thought \ud800 é")
    assert sealed.isascii()
    assert "thought" not in sealed
    for store in (first, opened(), opened(0)):
        assert store.unseal(b"owner", "reasoning", sealed) == "thought \ud800 é"
        store.close()
    again = opened(0)
    assert again.unseal(b"owner", "reasoning", sealed)
    assert again.unseal(b"owner", "reasoning", again.seal(b"owner", "reasoning", "")) == ""
    assert not run(again.put(b"k", "a", ENTRY))
    for wrong in (ResponseStore(), ResponseStore(0)):
        assert wrong.unseal(b"owner", "reasoning", sealed) is None


SEALING = ResponseStore(0)
# Of 39 bytes, so that base64 has one form of them.
SEALED = SEALING.seal(b"a", "reasoning", "7 words")


@given(st.integers(0, len(SEALED) - 1), st.characters(exclude_categories=()), st.integers(0, len(SEALED)))
def test_what_is_changed_is_not_unsealed(place, character, end):
    changed = SEALED[:place] + character + SEALED[place + 1 :]
    for text in (changed, SEALED[:end]):
        assert (SEALING.unseal(b"a", "reasoning", text) is not None) == (text == SEALED)
    # Further padding may be left out.
    assert SEALING.unseal(b"a", "reasoning", SEALED + character) in (None, "7 words")


@pytest.mark.parametrize("sealed", [None, 5, [], {}, "", "gAAAA", "dflash1.", "dflash1.é", "dflash1." + "A" * 2**22])
def test_what_is_foreign_is_not_unsealed(sealed):
    assert SEALING.unseal(b"a", "reasoning", sealed) is None
    assert SEALING.unseal(b"b", "reasoning", SEALED) is None
    assert SEALING.unseal(b"a", "compaction", SEALED) is None
    huge = SEALING.seal(b"a", "reasoning", "x" * 2**21)
    assert SEALING.unseal(b"a", "reasoning", huge) is None


def test_a_temporary_file_ends_with_the_interpreter(tmp_path):
    code = "import asyncio; from dflash_jax.server.response_store import ResponseStore, StoredResponse\n"
    code += "store = ResponseStore()\nasyncio.run(store.put(b'k', 'a', StoredResponse(b'x', b'y')))\nprint(store.path)"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    folder = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert folder.startswith(f"{tmp_path}/")
    assert not list(tmp_path.iterdir())


def test_processes_that_share_a_file_and_are_killed_leave_what_they_stored(path, opened):
    store = opened(10**6)
    nbytes, owners = 3_000_000, ("a", "b")
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, path, owner, str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for owner in owners
    ]
    try:
        for turn in range(4):
            for writer in writers:
                print(file=writer.stdin, flush=True)
            assert run(store.put(b"own", str(turn), ENTRY))
            assert [int(writer.stdout.readline()) for writer in writers] == [turn, turn]
        # Killed while they write.
        for writer in writers:
            print("\n" * 15, file=writer.stdin, flush=True)
        last = [int(writer.stdout.readline()) for writer in writers]
    finally:
        for writer in writers:
            writer.kill()
    last = [max([known, *map(int, writer.stdout.read().split())]) for known, writer in zip(last, writers, strict=True)]
    for writer in writers:
        writer.wait()
        writer.stdin.close()
        writer.stdout.close()
    for owner, most in zip(owners, last, strict=True):
        for i in range(most + 1):
            found = run(store.get(owner.encode(), str(i)))
            assert found == StoredResponse(b"%d" % (i % 10) * nbytes, b"x")
    store.close()
    check(path)
    again = opened(10**6)
    assert all(run(again.get(b"own", str(turn))) == ENTRY for turn in range(4))
    assert run(again.put(b"own", "new", ENTRY))


def test_a_file_is_read_with_its_log_where_a_kill_cut_the_copying_of_the_log_into_it(path, opened):
    store, large = opened(), StoredResponse(b"x" * 10**6, b"")
    store._writer.execute("PRAGMA wal_autocheckpoint = 0")
    assert run(store.put(b"k", "a", large))
    before, log, cut = path.read_bytes(), path.with_name(f"{path.name}-wal").read_bytes(), path.with_name("cut")
    store._writer.execute("PRAGMA wal_checkpoint")
    # The first page has the new size.
    cut.write_bytes(path.read_bytes()[:4096] + before[4096:])
    path.with_name("cut-wal").write_bytes(log)
    again = ResponseStore(path=cut)
    assert run(again.get(b"k", "a")) == large
    again.close()
    check(cut)


def test_a_process_sees_what_another_one_used(opened):
    one, other = opened(2), opened(2)
    for name in "ab":
        run(one.put(b"k", name, ENTRY))
    assert run(other.get(b"k", "a"))
    # Writes have an order: the use is written.
    assert not run(other.delete(b"k", "none"))
    run(one.put(b"k", "c", ENTRY))
    assert [run(other.get(b"k", name)) is not None for name in "abc"] == [True, False, True]
    assert run(other.delete(b"k", "a"))
    assert run(one.get(b"k", "a")) is None


def of_sqlite(application: int, version: int):
    def write(path):
        with closing(sqlite3.connect(path)) as connection:
            script = f"PRAGMA application_id = {application}; PRAGMA user_version = {version}; CREATE TABLE x(y);"
            connection.executescript(f"{script} PRAGMA journal_mode = WAL;")

    return write


def with_log(path):
    """A file of something else, with a log that closing it would write into it."""
    other = path.parent / "other"
    with closing(sqlite3.connect(other)) as connection:
        connection.executescript("PRAGMA journal_mode = WAL; CREATE TABLE x(y);")
        for name in ("", "-wal"):
            shutil.copy(f"{other}{name}", f"{path}{name}")


def truncated(path):
    ResponseStore(path=path).close()
    os.truncate(path, 8192)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b"hello" * 1000), "not a database"),
        (lambda path: path.write_bytes(b""), "no stored responses"),
        (of_sqlite(1, VERSION), "no stored responses"),
        (with_log, "no stored responses"),
        (of_sqlite(APPLICATION, VERSION + 1), f"version is {VERSION + 1}"),
        (truncated, "malformed"),
        (lambda path: path.mkdir(), "no regular file"),
        (os.mkfifo, "no regular file"),
        (lambda path: path.symlink_to("/nowhere/at/all"), "no regular file"),
    ],
    ids=["text", "empty", "other", "log", "version", "truncated", "directory", "pipe", "link"],
)
def test_another_file_is_refused_by_name_and_stays_as_it_is(path, write, message):
    write(path)
    names, content = sorted(path.parent.iterdir()), path.read_bytes() if path.is_file() else None
    with pytest.raises(InputError, match=message) as error:
        ResponseStore(path=path)
    assert str(path) in str(error.value)
    assert sorted(path.parent.iterdir()) == names
    assert content is None or path.read_bytes() == content


def test_a_server_refuses_the_file_before_it_loads_a_model(path, monkeypatch, capfd):
    path.write_text("hello")
    monkeypatch.setattr(supervisor.Supervisor, "_main", lambda self: pytest.fail("processes start"))
    monkeypatch.setattr(serve, "set_logging", lambda args: None)
    assert serve.main(["--bundled", "--port", "0", "--response-store-path", str(path)]) == 2
    assert f"--response-store-path {path}: file is not a database" in capfd.readouterr().err
    missing = path.parent / "none" / "file"
    assert serve.main(["--bundled", "--port", "0", "--response-store-path", str(missing)]) == 2
    assert f"{missing}: No such file or directory" in capfd.readouterr().err


def test_what_is_not_used_for_long_is_gone(path, opened, monkeypatch):
    now = time.time()
    monkeypatch.setattr(response_store.time, "time", lambda: now)
    store = opened(most_age_s=100)
    for name in "abc":
        assert run(store.put(b"k", name, ENTRY))
    now += 60
    assert run(store.get(b"k", "a"))
    assert not run(store.delete(b"k", "none"))
    now += 60
    # Reading what is left removes the others.
    assert [run(store.get(b"k", name)) is not None for name in "bca"] == [False, False, True]
    # Its id is free again, and what others left is removed from the file.
    assert run(store.put(b"k", "b", ENTRY))
    store.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT id FROM entries ORDER BY id").fetchall() == [(b"a",), (b"b",)]
    check(path)


def test_expired_entries_go_in_small_steps(path, opened, monkeypatch):
    now = time.time()
    monkeypatch.setattr(response_store.time, "time", lambda: now)
    store, left = opened(most_age_s=100), []
    for i in range(40):
        run(store.put(b"k", str(i), ENTRY))
    now += 1000
    with closing(sqlite3.connect(path)) as connection:
        for i in range(3):
            run(store.put(b"new", str(i), ENTRY))
            left += connection.execute("SELECT count(*) FROM entries WHERE owner = x'6B'").fetchone()
    assert left == [24, 8, 0]


def test_a_write_that_fails_says_why_and_the_next_one_may_succeed(path, opened, caplog):
    store, large = opened(), StoredResponse(b"x" * 10**6, b"")
    assert run(store.put(b"k", "a", ENTRY))
    (most,) = store._writer.execute("PRAGMA page_count").fetchone()
    for fails, works, message in (
        (f"max_page_count = {most}", "max_page_count = 1000000", "disk is full"),
        ("query_only = 1", "query_only = 0", "readonly"),
    ):
        store._writer.execute(f"PRAGMA {fails}")
        with pytest.raises(ApiError, match=message) as error:
            run(store.put(b"k", message, large))
        assert (error.value.status_code, message in caplog.text) == (500, True)
        assert run(store.get(b"k", "a")) == ENTRY
        assert run(store.get(b"k", message)) is None
        store._writer.execute(f"PRAGMA {works}")
        assert run(store.put(b"k", message, large))
    store.close()
    check(path)


def test_reads_do_not_wait_for_the_writes_of_another_process(path, opened):
    store = opened()

    async def work():
        assert await store.put(b"k", "a", ENTRY)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            put = asyncio.create_task(store.put(b"k", "b", ENTRY))
            for _ in range(10):
                assert await store.get(b"k", "a") == ENTRY
            assert not put.done()
            other.execute("COMMIT")
            assert await put

    run(work())


def test_an_entry_of_many_bytes_takes_the_event_loop_no_time(opened):
    store, entry = opened(), StoredResponse(b"r" * 10**6, os.urandom(2**26))

    async def work():
        began = time.thread_time()
        assert await store.put(b"k", "a", entry)
        found = await store.get(b"k", "a")
        took = time.thread_time() - began
        assert found == entry
        return took

    assert run(work()) < 0.05


TEXT = st.text(st.characters(exclude_categories=()) | st.sampled_from("'\"\0\ud800"))


@settings(max_examples=30)
@example([(b"k", name) for name in ("\ud800", "\udfff", "?", "a\0b", "a\0c", "a", "'", '"', "")])
@given(st.lists(st.tuples(st.binary(), TEXT), unique=True, max_size=8))
def test_ids_of_any_characters_are_distinct(names):
    store = ResponseStore()

    async def work():
        for i, (owner, name) in enumerate(names):
            assert await store.get(owner, name) is None
            assert await store.put(owner, name, StoredResponse(b"%d" % i, b""), (None, name))
        for i, (owner, name) in enumerate(names):
            assert (await store.get(owner, name)).response == b"%d" % i
            assert await store.delete(owner, name)
            assert await store.get(owner, name) is None

    run(work())
    store.close()
