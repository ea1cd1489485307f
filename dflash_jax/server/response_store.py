"""Responses that a later request may continue: one SQLite file, bounded in number, bytes and age.

Several processes may use one file. Each API key sees its own responses only.
"""

import asyncio
import base64
import hmac
import logging
import os
import secrets
import shutil
import sqlite3
import tempfile
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_jax.errors import InputError
from dflash_jax.server.capacity import FairCapacity
from dflash_jax.server.errors import ApiError

log = logging.getLogger("dflash_jax.server")

# Most bytes of all entries together, and most seconds since an entry's last use.
MOST_BYTES, MOST_AGE_S = 256 * 2**20, 30 * 86400.0
# Seconds to wait for the writes of other processes.
LOCK_S = 10.0
# Seconds that a read or a write waits for those before it, at most, and reads that may wait.
WAIT_S, WAITING = 60.0, 256
# Expired entries that one write removes at most.
STEP_ENTRIES = 16
# Identifies a file of stored responses, and the version of its tables.
APPLICATION, VERSION = 0x44464C52, 3
# How a sealed text begins, and most characters of one.
SEAL, MOST_SEALED = "dflash1.", 2**21
# Ids are bytes: SQLite's text has no unpaired surrogates. The row of the empty client has the sums of all clients.
TABLES = f"""
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
CREATE TABLE entries(
    number INTEGER PRIMARY KEY, owner BLOB NOT NULL, id BLOB NOT NULL, client BLOB NOT NULL,
    used REAL NOT NULL, nbytes INTEGER NOT NULL, response_bytes INTEGER NOT NULL, output_bytes INTEGER NOT NULL,
    item_key BLOB NOT NULL, UNIQUE(owner, id));
CREATE INDEX entries_by_items ON entries(owner, item_key);
CREATE INDEX entries_by_use ON entries(used);
CREATE INDEX entries_by_client ON entries(client, used);
CREATE TABLE contents(number INTEGER PRIMARY KEY, content BLOB NOT NULL);
CREATE TABLE secrets(seal BLOB NOT NULL);
CREATE TABLE clients(client BLOB PRIMARY KEY, entries INTEGER, nbytes INTEGER, used REAL) WITHOUT ROWID;
CREATE INDEX clients_by_entries ON clients(entries DESC, used);
CREATE INDEX clients_by_nbytes ON clients(nbytes DESC, used);
CREATE TRIGGER stored AFTER INSERT ON entries BEGIN
    INSERT INTO clients VALUES (new.client, 1, new.nbytes, new.used), (x'', 1, new.nbytes, new.used)
    ON CONFLICT(client) DO UPDATE SET entries = entries + 1, nbytes = nbytes + excluded.nbytes, used = excluded.used;
END;
CREATE TRIGGER used AFTER UPDATE OF used ON entries BEGIN
    UPDATE clients SET used = new.used WHERE client = new.client;
END;
CREATE TRIGGER deleted AFTER DELETE ON entries BEGIN
    DELETE FROM contents WHERE number = old.number;
    UPDATE clients SET entries = entries - 1, nbytes = nbytes - old.nbytes WHERE client IN (old.client, x'');
    DELETE FROM clients WHERE client = old.client AND entries = 0;
END;
PRAGMA journal_mode = WAL;
"""
NAMED, OF_ITEMS = "owner = ? AND id = ?", "owner = ? AND item_key = ?"
EVICT = """DELETE FROM entries WHERE number = (SELECT number FROM entries WHERE client = (
    SELECT client FROM clients WHERE client != x'' ORDER BY {} DESC, used LIMIT 1) ORDER BY used LIMIT 1)"""


@dataclass(frozen=True)
class StoredResponse:
    """A response and the conversation before it. The next turn needs no other entry.

    Attributes:
        response: The response as JSON, without log-probabilities. Its last field is its output.
        input: All items of the conversation before it, as JSON, one a line.
        output_bytes: Bytes of the output.
        item_key: What the ids of all items of the output have in common, and no others.
    """

    response: bytes
    input: bytes
    output_bytes: int = 0
    item_key: bytes = b""

    @property
    def output(self) -> bytes:
        """The output as JSON."""
        return self.response[-self.output_bytes - 1 : -1]

    def places(self, from_end: bool = False) -> Iterator[tuple[int, int]]:
        """Yields where each item of ``input`` begins and ends, the last item first if ``from_end``."""
        begin, end = 0, len(self.input)
        while from_end and end >= 0:
            begin = self.input.rfind(b"\n", 0, end) + 1
            yield begin, end
            end = begin - 1
        while begin <= end:
            stop = self.input.find(b"\n", begin)
            stop = end if stop < 0 else stop
            yield begin, stop
            begin = stop + 1

    @property
    def nbytes(self) -> int:
        """Bytes of the entry."""
        return len(self.response) + len(self.input)


def _connect(path: Path, query: str = "mode=rw") -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{query}"
    return sqlite3.connect(uri, LOCK_S, isolation_level=None, check_same_thread=False, uri=True)


def _create(path: Path) -> None:
    """Creates a file without entries where there is none: other processes see it when it is complete."""
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as folder:
        fresh = Path(folder, "fresh")
        fresh.touch(0o600)
        with closing(_connect(fresh)) as connection:
            connection.executescript(TABLES)
            connection.execute("INSERT INTO secrets VALUES (?)", (secrets.token_bytes(32),))
        with suppress(FileExistsError):
            os.link(fresh, path)


def _check(path: Path) -> None:
    """Raises InputError for any other file than one of this version, without a change to it."""
    if not path.is_file():
        raise InputError("it is no regular file")
    # Not opened as a plain file: closing that would release the locks of other connections of this process.
    with closing(_connect(path, "mode=ro&immutable=1")) as connection:
        # A process that was killed may have left a file that is complete only with its log.
        connection.execute("PRAGMA writable_schema = ON")
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION:
        raise InputError("it has no stored responses: name another file")
    if version != VERSION:
        raise InputError(f"its version is {version}, and this server's is {VERSION}: name another file")


def _open(path: Path, at_end: ExitStack) -> tuple[sqlite3.Connection, sqlite3.Connection]:
    """Connections for reads and for writes, which ``at_end`` closes. The file is created if it is missing."""
    if not os.path.lexists(path):
        _create(path)
    _check(path)
    reader, writer = (at_end.enter_context(closing(_connect(path))) for _ in range(2))
    # Whether it is sound and can be written.
    writer.executescript(f"PRAGMA journal_size_limit = {2**22}; BEGIN IMMEDIATE; ROLLBACK")
    return reader, writer


def _bytes(response_id: str) -> bytes:
    return response_id.encode("utf-8", "surrogatepass")


class ResponseStore:
    """Stored responses of all clients, in a file that several processes may use.

    When the store is full, the client with the most entries loses its least recently used one, so that no client can
    displace others' responses by storing many.

    Args:
        size: Most entries; 0 for none. The file then has the key of seals alone.
        most_bytes: Most bytes of all entries.
        path: The file; None for a temporary one, which is removed with the store.
        most_age_s: Most seconds since an entry's last use.
        is_temporary: Whether the file need not outlast a failure of power. Another process removes it.

    Attributes:
        size: Most entries.
        most_bytes: Most bytes of all entries.
        path: The file; None without one.

    Raises:
        InputError: The file is of another kind or version, or cannot be written.
    """

    def __init__(
        self,
        size: int = 1024,
        most_bytes: int = MOST_BYTES,
        path: str | Path | None = None,
        most_age_s: float = MOST_AGE_S,
        is_temporary: bool = False,
    ):
        self.size, self.most_bytes, self._most_age_s = size, most_bytes, most_age_s
        self.path = None if path is None else Path(path)
        # One thread each: writes have an order, and reads do not wait for them. Clients read by turns.
        self._reading, self._writing = (ThreadPoolExecutor(1, f"responses-{name}") for name in ("read", "write"))
        self._turns = FairCapacity(1, "stored responses", WAITING)
        # Entries whose last use is to be written.
        self._touched: set[int] = set()
        self._will_touch = False
        at_end = ExitStack()
        # When the store is garbage, too, or the interpreter ends.
        self._end = weakref.finalize(self, at_end.close)
        self._secret = secrets.token_bytes(32)
        if not size and path is None:
            return
        try:
            if self.path is None:
                folder = tempfile.mkdtemp(prefix="dflash-responses-")
                at_end.callback(shutil.rmtree, folder, ignore_errors=True)
                self.path, is_temporary = Path(folder, "responses.sqlite"), True
            self._reader, self._writer = _open(self.path, at_end)
            (self._secret,) = self._reader.execute("SELECT seal FROM secrets").fetchone()
            # What is deleted from a file that is kept is to be gone.
            for pragma in ("synchronous = OFF",) if is_temporary else ("synchronous = NORMAL", "secure_delete = ON"):
                self._writer.execute(f"PRAGMA {pragma}")
        except (InputError, OSError, ValueError, sqlite3.Error) as e:
            self._end()
            reason = getattr(e, "strerror", None) or e
            where = "the temporary file of stored responses" if path is None else f"--response-store-path {path}"
            raise InputError(f"{where}: {reason}") from None

    def seal(self, owner: bytes, kind: str, text: str) -> str:
        """A text that a client keeps: with `unseal` the same owner has it read again, as of the same kind only."""
        data = text.encode("utf-8", "surrogatepass")
        return SEAL + base64.urlsafe_b64encode(self._signature(owner, kind, data) + data).decode("ascii")

    def unseal(self, owner: bytes, kind: str, sealed: object) -> str | None:
        """The text of a `seal`; None for anything else, such as what other servers have encrypted."""
        if not isinstance(sealed, str) or not sealed.startswith(SEAL) or len(sealed) > MOST_SEALED:
            return None
        try:
            signed = base64.b64decode(sealed[len(SEAL) :], b"-_", validate=True)
        except ValueError:
            return None
        signature, data = signed[:32], signed[32:]
        if not hmac.compare_digest(signature, self._signature(owner, kind, data)):
            return None
        return data.decode("utf-8", "surrogatepass")

    def _signature(self, owner: bytes, kind: str, data: bytes) -> bytes:
        key = hmac.digest(self._secret, b"%b %b" % (kind.encode("ascii"), owner), "sha256")
        return hmac.digest(key, data, "sha256")

    async def get(self, owner: bytes, response_id: str) -> StoredResponse | None:
        """The entry of an owner; None where there is none."""
        return await self._used(self._read, owner, _bytes(response_id))

    async def output(self, owner: bytes, item_key: bytes) -> bytes | None:
        """The output, as JSON, that has the items of an ``item_key`` of an owner; None where there is none."""
        return await self._used(self._read_output, owner, item_key)

    async def _used(self, read: Callable[..., Any], *arguments) -> Any:
        """What is read of an entry, whose last use is now."""
        with await self._turns.take(1):
            found = await self._on(self._reading, read, *arguments)
        if found is None:
            return None
        number, value = found
        self._touched.add(number)
        if not self._will_touch:
            self._will_touch = True
            self._writing.submit(self._touch)
        return value

    async def put(self, owner: bytes, response_id: str, entry: StoredResponse, client: Hashable = None) -> bool:
        """Stores an entry.

        Args:
            owner: Who may read it.
            response_id: Its id, which clients may choose.
            entry: The entry.
            client: Who stores it, for servers without keys, where the owner does not identify the client.

        Returns:
            Whether it is stored: not where the id is taken or the entry is too large.

        Raises:
            ApiError: 500, the file cannot be written.
        """
        client = repr(owner if client is None else client).encode()
        return bool(await self._on(self._writing, self._put, owner, _bytes(response_id), entry, client))

    async def delete(self, owner: bytes, response_id: str) -> bool:
        """Deletes an entry; whether there was one."""
        return bool(await self._on(self._writing, self._delete, owner, _bytes(response_id)))

    def close(self) -> None:
        """Completes the writes, and closes the file. A temporary one is removed."""
        for thread in (self._reading, self._writing):
            thread.shutdown()
        self._end()

    async def _on(self, thread: ThreadPoolExecutor, work: Callable[..., Any], *arguments) -> Any:
        if not self.size:
            return None
        deadline = time.monotonic() + WAIT_S

        def in_time() -> Any:
            if time.monotonic() > deadline:
                raise sqlite3.OperationalError("another process has locked the file for too long")
            return work(*arguments)

        try:
            return await asyncio.get_running_loop().run_in_executor(thread, in_time)
        except (sqlite3.Error, OSError) as e:
            log.error("stored responses: %s", e)
            # Not 503: it would be the same at another replica.
            raise ApiError(500, f"stored responses cannot be used: {e}; a request with store: false can") from None

    @contextmanager
    def _content(self, named: str, owner: bytes, name: bytes) -> Iterator[tuple[tuple, sqlite3.Blob] | None]:
        """Of an entry: its number, the bytes of its response and output, its item key, and its content."""
        # One transaction: the entry and its content are of one state of the file.
        with self._reader as reader:
            reader.execute("BEGIN")
            columns = "number, response_bytes, output_bytes, item_key"
            query = f"SELECT {columns} FROM entries WHERE {named} AND used > ?"
            row = reader.execute(query, (owner, name, time.time() - self._most_age_s)).fetchone()
            if row is None:
                yield None
                return
            # A blob's bytes are read and written without the interpreter's lock, which a value's copy needs.
            with reader.blobopen("contents", "content", row[0], readonly=True) as blob:
                yield row, blob

    def _read(self, owner: bytes, name: bytes) -> tuple[int, StoredResponse] | None:
        with self._content(NAMED, owner, name) as found:
            if found is None:
                return None
            (number, response_bytes, output_bytes, item_key), blob = found
            return number, StoredResponse(blob.read(response_bytes), blob.read(), output_bytes, item_key)

    def _read_output(self, owner: bytes, item_key: bytes) -> tuple[int, bytes] | None:
        with self._content(OF_ITEMS, owner, item_key) as found:
            if found is None:
                return None
            (number, response_bytes, output_bytes, _), blob = found
            blob.seek(response_bytes - 1 - output_bytes)
            return number, blob.read(output_bytes)

    def _put(self, owner: bytes, name: bytes, entry: StoredResponse, client: bytes) -> bool:
        now = time.time()
        self._expire(now)
        if entry.nbytes > self.most_bytes:
            return False
        with self._writer as writer:
            writer.execute("BEGIN IMMEDIATE")
            query = f"DELETE FROM entries WHERE {NAMED} AND used <= ?"
            writer.execute(query, (owner, name, now - self._most_age_s))
            columns = "owner, id, client, used, nbytes, response_bytes, output_bytes, item_key"
            sizes = entry.nbytes, len(entry.response), entry.output_bytes
            values = (owner, name, client, now, *sizes, entry.item_key)
            query = f"INSERT INTO entries({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
            added = writer.execute(query, values)
            if not added.rowcount:
                return False
            number: Any = added.lastrowid
            writer.execute("INSERT INTO contents VALUES (?, zeroblob(?))", (number, entry.nbytes))
            with writer.blobopen("contents", "content", number) as blob:
                blob.write(entry.response)
                blob.write(entry.input)
        # Each eviction is a transaction of its own, between which other processes write.
        for column, most in (("entries", self.size), ("nbytes", self.most_bytes)):
            full, evict = f"SELECT 1 FROM clients WHERE client = x'' AND {column} > ?", EVICT.format(column)
            while writer.execute(full, (most,)).fetchone() and writer.execute(evict).rowcount:
                pass
        return writer.execute(f"SELECT 1 FROM entries WHERE {NAMED}", (owner, name)).fetchone() is not None

    def _delete(self, owner: bytes, name: bytes) -> bool:
        return self._writer.execute(f"DELETE FROM entries WHERE {NAMED}", (owner, name)).rowcount > 0

    def _touch(self) -> None:
        now, self._will_touch = time.time(), False
        used = [(now, self._touched.pop()) for _ in range(len(self._touched))]
        with self._writer as writer:
            writer.execute("BEGIN IMMEDIATE")
            writer.executemany("UPDATE entries SET used = ? WHERE number = ?", used)
        self._expire(now)

    def _expire(self, now: float) -> None:
        oldest = "SELECT number FROM entries WHERE used <= ? ORDER BY used LIMIT ?"
        self._writer.execute(f"DELETE FROM entries WHERE number IN ({oldest})", (now - self._most_age_s, STEP_ENTRIES))
