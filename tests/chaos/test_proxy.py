"""The proxy before NATS passes everything in order, and can delay, break and cut off by a node's name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from chaos.proxy import Delay, Proxy


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    """A server that sends back what it gets; yields its port."""
    writers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            while data := await reader.read(4096):
                writer.write(data)
        except ConnectionError:
            pass

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


opened: list[asyncio.StreamWriter] = []


async def connect(port: int, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Say who this is, as NATS clients do."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    opened.append(writer)
    hello = b'CONNECT {"verbose":false,"name":"%b"}\r\n' % name.encode()
    writer.write(hello)
    assert await reader.readexactly(len(hello)) == hello
    return reader, writer


def through(scenario: Callable[[Proxy], Awaitable[None]]) -> None:
    """Run a scenario with a proxy before an echo."""

    async def main() -> None:
        async with echo() as port:
            proxy = Proxy("127.0.0.1", port, seed=1)
            await proxy.start()
            try:
                await scenario(proxy)
            finally:
                while opened:
                    opened.pop().close()
                await proxy.stop()

    asyncio.run(main())


def test_delayed_pieces_keep_their_order() -> None:
    """Each piece has a delay of its own, and none overtakes another."""

    async def scenario(proxy: Proxy) -> None:
        reader, writer = await connect(proxy.port, "light-0-control")
        proxy.delay = Delay(0.0, 0.01)
        sent = b""
        for number in range(20):
            sent += b"%d " % number
            writer.write(b"%d " % number)
            await asyncio.sleep(0)
        assert await reader.readexactly(len(sent)) == sent

    through(scenario)


def test_a_cut_holds_back_all_connections_of_one_node_until_it_is_healed() -> None:
    """Nothing is lost, nobody else is met, and a name that only begins alike is another node's."""

    async def scenario(proxy: Proxy) -> None:
        cut = [await connect(proxy.port, name) for name in ("light-1", "light-1-stream")]
        free = await connect(proxy.port, "light-10-stream")
        assert proxy.cut("light-1") == 2
        for _, writer in [*cut, free]:
            writer.write(b"word")
        assert await free[0].readexactly(4) == b"word"
        waiting = [asyncio.ensure_future(reader.readexactly(4)) for reader, _ in cut]
        done, _ = await asyncio.wait(waiting, timeout=0.05)
        assert not done
        proxy.heal("light-1")
        assert await asyncio.gather(*waiting) == [b"word", b"word"]

    through(scenario)


def test_a_reset_breaks_the_connections_of_a_node() -> None:
    """They may come back at once."""

    async def scenario(proxy: Proxy) -> None:
        broken, _ = await connect(proxy.port, "decode-0-control")
        kept, writer = await connect(proxy.port, "decode-1-control")
        assert proxy.reset("decode-0") == 1
        try:
            assert await broken.read(1) == b""
        except ConnectionError:
            pass
        writer.write(b"word")
        assert await kept.readexactly(4) == b"word"
        await connect(proxy.port, "decode-0-control")

    through(scenario)


def test_a_plain_end_of_one_side_is_passed_on_and_the_other_goes_on() -> None:
    """A client that has said all still hears the rest, and then the end: nothing is reset, also when all is slow."""

    async def main() -> None:
        heard = bytearray()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.extend(await reader.read(-1))  # up to the client's end
            writer.write(b"y" * 300_000)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        proxy = Proxy("127.0.0.1", int(server.sockets[0].getsockname()[1]), seed=1)
        proxy.delay = Delay(0.0, 0.01)
        await proxy.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        try:
            writer.write(b"x" * 200_000)
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(-1), 10.0)
            assert (len(heard), len(answer)) == (200_000, 300_000)
        finally:
            writer.close()
            await proxy.stop()
            server.close()

    asyncio.run(main())
