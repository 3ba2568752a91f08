"""Connections between the hosts of a job: each connects to the others, by name, and sends data."""

import contextlib
import os
import time
from collections.abc import Sequence

from rollcall.launch.doctor.check import LocalNode, Result, Skip, judge, warn
from rollcall.messages.text import listed
from rollcall.system import hosts

BYTES = 2**20
"""Bytes to each host, and back: large messages may hang where small ones pass."""
REACH = 16
"""Each host connects to the 16 before and after it; up to 33 hosts, those are all others."""
MEET, TIMEOUT = 4.0, 1.5
"""Seconds within which all hosts must have begun, and that a connection may take."""
Answers = tuple[dict[str, str], dict[str, str], set[str]]
"""By the name of each other host: the name that answered, and why none did; then who came here."""


def connections(node: LocalNode) -> Result:
    this = node.env.get("SLURMD_NODENAME", os.uname().nodename)
    others = neighbours(node.hosts, this)
    if node.meeting is None or not others:
        raise Skip("only the nodes of one job can be compared")
    return judged(exchange(this, others, f"{node.env['SLURM_JOB_ID']}-{node.meeting.name}"))


def judged(answers: Answers) -> Result:
    """Return the result: a host is bad if it reaches none or the wrong ones, or none reaches it."""
    names, problems, came = answers
    wrong = [f"the name {name} leads to {who}" for name, who in names.items() if name != who]
    failures = [f"{name}: {reason}" for name, reason in problems.items()]
    if not names:
        wrong = [f"it reaches no other host: {listed(failures, 3)}"]
    if not came:
        wrong.append("no other host reaches it")
    if wrong:
        return judge("; ".join(wrong[:3]), "")
    fine = f"1 MB to and from {len(names)} other hosts"
    return warn(failures and f"it does not reach {listed(failures, 3)}", fine)


def neighbours(names: Sequence[str], this: str) -> list[str]:
    """Return the hosts to which a host connects; these connect to it, too."""
    if this not in names:
        return []
    number, count = names.index(this), len(names)
    return sorted({names[(number + step) % count] for step in range(-REACH, REACH + 1)} - {this})


def exchange(this: str, others: Sequence[str], key: str, address: str | None = None) -> Answers:
    """Connect to the others, which do the same with this key, and send data in both directions."""
    import asyncio  # here, because few commands need it

    names, failures, came = dict[str, str](), dict[str, str](), set[str]()
    end = time.monotonic() + MEET
    data, port = f"{key} {this}".encode().ljust(BYTES), hosts.port(key)

    async def receive(reader: asyncio.StreamReader) -> str:
        received = await asyncio.wait_for(reader.readexactly(BYTES), TIMEOUT)
        word, _, name = received.rstrip().decode(errors="replace").partition(" ")
        if word != key:
            raise ConnectionError("another program answers")
        return name

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError), contextlib.closing(writer):
            name = await receive(reader)
            writer.write(data)
            await writer.drain()
            came.add(name)

    async def ask(other: str) -> None:
        while other not in names and time.monotonic() < end:
            try:
                link = asyncio.open_connection(other, port)
                reader, writer = await asyncio.wait_for(link, TIMEOUT)
                with contextlib.closing(writer):
                    writer.write(data)
                    names[other] = await receive(reader)
                failures.pop(other, None)
            except (OSError, EOFError) as error:  # it may not have begun yet
                number = getattr(error, "errno", None) or 0
                failures[other] = os.strerror(number) if number > 0 else str(error) or "no answer"
                await asyncio.sleep(0.1)

    async def meet() -> None:
        try:
            server = await asyncio.start_server(answer, address, port)
        except OSError as error:
            raise Skip(f"port {port}: {error.strerror}") from None
        await asyncio.gather(*map(ask, others))
        while not came >= {*others} and time.monotonic() < end:
            await asyncio.sleep(0.02)
        server.close()

    asyncio.run(meet())
    return names, failures, came
