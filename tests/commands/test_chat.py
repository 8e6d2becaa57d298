"""`repertory chat`: on a fake engine what a conversation becomes, as a process what a terminal sees of it."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

import anyio
import pytest

from repertory.__main__ import main
from repertory.actors.commands import chat
from repertory.protocol.config import EngineConfig
from repertory.protocol.errors import EngineDeadError, NeverFitsError
from repertory.protocol.outputs import BlockCounts, EngineStats

LIMIT_S = 120
SETTINGS = EngineConfig(model="demo")
CTRL_C, CTRL_D = "\x03", "\x04"


@pytest.fixture
def engine_with(fake_engine):
    """Makes a fake engine that chats and has figures."""

    class ChatEngine(fake_engine):
        async def stats(self):
            counts = BlockCounts(10, 7, 2, 1)
            return EngineStats(
                num_running=0, num_waiting=0, num_preempted=0, device_blocks=counts, host_blocks=BlockCounts(0, 0, 0, 0),
                prefix_cache_queries=50, prefix_cache_hits=40, num_preemptions={}, swap_out_bytes=0, swap_in_bytes=0,
                num_steps=99, num_restarts=3, num_computed_tokens=70,
            )  # fmt: skip

    return lambda *args, **options: ChatEngine(*args, has_chat_template=True, **options)


class Talk:
    """One conversation held on `engine`, with `lines` typed into it."""

    def __init__(self, engine, lines, *, on_terminal=False, system=None):
        self.engine, self.lines = engine, iter(lines)
        self.out, self.err = io.StringIO(), io.StringIO()
        self.conversation = chat.Conversation(
            chat.ReplyFlags(), system=system, on_terminal=on_terminal, out=self.out, err=self.err
        )
        self.status = chat.run(self.conversation, SETTINGS, factory=engine.open, read_line=self.read_line)

    def read_line(self):
        line = next(self.lines, None)
        if line == CTRL_C:
            interrupt()
        return line

    @property
    def said(self):
        return [f"{message['role'][0]}: {message['content']}" for message in self.conversation.messages]


def interrupt():
    """Ctrl-C: a signal to the process, whichever thread asks for it."""
    os.kill(os.getpid(), signal.SIGINT)


def last_line(prompt):
    """An answer that says the user's last line again."""
    return [prompt[-1]["content"], "!"], ("stop", None)


def interrupted_at(word):
    """An `act` that presses Ctrl-C before the given word of a reply, which then never comes."""

    async def act(prompt, number):
        if number == word and prompt[-1]["content"] == "long":
            interrupt()
            await anyio.sleep_forever()

    return act


# ---- what is said --------------------------------------------------------------------------------


def test_each_turn_is_answered_with_the_whole_conversation(engine_with):
    engine = engine_with(last_line)
    talk = Talk(engine, ["one\n", "  two\n"], system="Be brief.")
    assert (talk.status, talk.out.getvalue(), talk.err.getvalue()) == (0, "one!\ntwo!\n", "")
    assert talk.said == ["s: Be brief.", "u: one", "a: one!", "u: two", "a: two!"]
    assert engine.streams[1].prompt == talk.conversation.messages[:-1]
    assert not engine.is_open


def test_a_reply_is_written_as_it_comes(engine_with):
    seen = []

    async def act(_prompt, _number):
        seen.append(out.getvalue())

    out = io.StringIO()
    conversation = chat.Conversation(chat.ReplyFlags(), out=out)
    chat.run(conversation, SETTINGS, factory=engine_with(act=act).open, read_line=iter(["hi", None]).__next__)
    assert seen == ["", "Hello"]


def test_blank_lines_are_no_turns(engine_with):
    engine = engine_with()
    assert Talk(engine, ["\n", "   ", ""]).out.getvalue() == ""
    assert engine.streams == []


def test_reset_forgets_everything_but_the_system_message(engine_with):
    talk = Talk(engine_with(last_line), ["one", "/reset", "two"], system="Be brief.")
    assert talk.said == ["s: Be brief.", "u: two", "a: two!"]


def test_exit_ends_the_conversation_before_what_follows(engine_with):
    engine = engine_with()
    assert Talk(engine, ["hi", " /exit ", "more"]).status == 0
    assert len(engine.streams) == 1


def test_stats_shows_the_last_reply_and_the_engine(engine_with):
    text = Talk(engine_with(), ["/stats", "hi", "/stats"]).out.getvalue()
    assert text.count("engine: 99 steps, 70 tokens computed, 40 of 50 prompt tokens") == 2
    assert text.count("last reply: 2 tokens to a prompt of 10 (4 of them cached)\n") == 1
    assert "3 of 10 KV blocks" in text


def test_a_mistyped_command_is_not_sent_to_the_model_and_a_path_in_a_sentence_is(engine_with):
    engine = engine_with()
    talk = Talk(engine, ["/rest", "/etc is what?"])
    assert "/reset" in talk.out.getvalue()
    assert talk.said[0] == "u: /etc is what?"


def test_a_terminal_is_told_the_commands_and_a_pipe_is_not(engine_with):
    assert "/exit" in Talk(engine_with(), [], on_terminal=True).out.getvalue()
    assert Talk(engine_with(), []).out.getvalue() == ""


def test_a_reply_that_ends_with_a_newline_gets_no_second_one(engine_with):
    talk = Talk(engine_with(lambda _: (["a\n", ""], ("stop", None))), ["hi"])
    assert talk.out.getvalue() == "a\n"
    assert talk.said == ["u: hi", "a: a\n"]


def test_a_reply_that_reached_its_limit_says_so(engine_with):
    assert Talk(engine_with(lambda _: (["a", "b"], ("length", None))), ["hi"]).out.getvalue() == "ab [cut off]\n"


# ---- Ctrl-C --------------------------------------------------------------------------------------


def test_an_interrupt_ends_the_reply_and_what_was_said_stays_in_the_conversation(engine_with):
    engine = engine_with(last_line, act=interrupted_at(2))
    talk = Talk(engine, ["long", "next"])
    assert talk.status == 0
    assert talk.out.getvalue() == "long [ended]\nnext!\n"
    assert talk.said == ["u: long", "a: long", "u: next", "a: next!"]
    assert engine.streams[0].closed
    assert not engine.streams[0].finished


def test_an_interrupt_before_the_first_word_takes_the_turn_back(engine_with):
    talk = Talk(engine_with(last_line, act=interrupted_at(1)), ["long", "next"])
    assert talk.said == ["u: next", "a: next!"]


@pytest.mark.parametrize("lines", [[CTRL_C], ["hi", CTRL_C], ["long", CTRL_C], ["long", "/stats", "long", CTRL_C]])
def test_an_interrupt_at_the_prompt_ends_the_program(engine_with, lines):
    engine = engine_with(last_line, act=interrupted_at(2))
    with pytest.raises(KeyboardInterrupt):
        Talk(engine, [*lines, "never read"], on_terminal=True)
    assert all(stream.closed for stream in engine.streams)
    assert not engine.is_open
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_while_the_reply_is_being_ended_ends_the_program(engine_with):
    async def act(_prompt, _number):
        interrupt()
        try:
            await anyio.sleep_forever()
        finally:
            interrupt()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)  # the time that the second one takes to reach the waiting thread

    engine = engine_with(act=act)
    with pytest.raises(KeyboardInterrupt):
        Talk(engine, ["hi", "never read"])
    assert len(engine.streams) == 1
    assert not engine.is_open


def test_impatient_interrupts_do_not_stop_the_closing_halfway(engine_with):
    engine = engine_with()
    steps = []

    class Slow:
        async def __aenter__(self):
            engine.is_open = True
            return engine

        async def __aexit__(self, *_):
            for step in range(3):
                interrupt()
                await anyio.lowlevel.checkpoint()
                steps.append(step)

    engine.open = lambda _config: Slow()
    with pytest.raises(KeyboardInterrupt):
        Talk(engine, [CTRL_C])
    assert steps == [0, 1, 2]


# ---- what goes wrong -----------------------------------------------------------------------------


def too_long(prompt):
    if len(prompt) > 2:
        return NeverFitsError("the prompt has 90 tokens and needs room for one more (91), but max_model_len is 80")
    return last_line(prompt)


@pytest.mark.parametrize(("on_terminal", "status"), [(True, 0), (False, 2)])
def test_a_conversation_that_no_longer_fits_is_told_so_and_its_turn_is_taken_back(engine_with, on_terminal, status):
    talk = Talk(engine_with(too_long), ["one", "two"], on_terminal=on_terminal)
    assert talk.status == status
    assert talk.err.getvalue() == (
        "error: the prompt has 90 tokens and needs room for one more (91), but max_model_len is 80 "
        "(/reset begins a new conversation)\n"
    )
    assert talk.said == ["u: one", "a: one!"]


def test_after_a_reset_a_conversation_that_did_not_fit_goes_on(engine_with):
    assert Talk(engine_with(too_long), ["one", "two", "/reset", "three"]).said == ["u: three", "a: three!"]


def test_a_reply_that_fails_inside_is_reported_and_taken_back(engine_with):
    talk = Talk(engine_with(lambda _: (["Hel", ""], ("error", "logits are\nnot finite"))), ["hi"])
    assert (talk.status, talk.out.getvalue(), talk.err.getvalue()) == (1, "Hel\n", "error: logits are not finite\n")
    assert talk.said == []


def test_a_failure_inside_weighs_more_than_a_refusal(engine_with):
    def answer(prompt):
        return too_long(prompt) if prompt[-1]["content"] != "bad" else (["x"], ("error", "broken"))

    assert Talk(engine_with(answer), ["one", "two", "bad", "three"]).status == 1


# ---- as a command --------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `repertory chat --model demo ...` with `stdin` piped in; returns (status, stdout, stderr)."""
    for name in [name for name in os.environ if name.startswith("REPERTORY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(chat, "configure_logging", lambda *_: None)

    def run(engine, *arguments, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode(errors="surrogateescape"))))
        monkeypatch.setattr(chat, "open_engine", engine.open)
        status = main(["chat", "--model", "demo", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_input_from_a_pipe_has_a_turn_a_line_and_no_prompt(command, engine_with):
    engine = engine_with(last_line)
    assert command(engine, stdin="one\ntwo") == (0, "one!\ntwo!\n", "")
    assert len(engine.streams[1].prompt) == 3


def test_the_flags_reach_the_engine_and_the_requests(command, engine_with):
    engine = engine_with()
    assert command(engine, "--temperature", "0", "--seed", "3", "--block-size", "32", "--system", "x", stdin="hi")[0] == 0
    params = engine.streams[0].params
    assert (params.temperature, params.seed, params.max_tokens, params.output_kind) == (0.0, 3, 512, "delta")
    assert (engine.config.block_size, engine.config.log_level) == (32, "warning")
    assert engine.streams[0].prompt[0] == {"role": "system", "content": "x"}


def test_a_flag_out_of_range_is_refused_before_any_engine_is_opened(command, engine_with):
    engine = engine_with()
    assert command(engine, "--top-p", "7")[0] == 2
    assert engine.config is None


def test_a_model_without_a_chat_template_is_refused(command, fake_engine):
    status, _, err = command(fake_engine(), stdin="hi")
    assert status == 2
    assert "no chat template" in err


def test_input_that_is_no_text_is_refused(command, engine_with):
    status, _, err = command(engine_with(), stdin="caf\udce9\n")
    assert status == 2
    assert err.startswith("error: standard input: not UTF-8")


def test_a_dead_engine_exits_1(command, engine_with):
    engine = engine_with(lambda _: EngineDeadError("the device host died"))
    assert command(engine, stdin="hi\nhi\n") == (1, "", "error: the device host died\n")
    assert len(engine.streams) == 1


# ---- as a process at a terminal -------------------------------------------------------------------


AT_ITS_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from repertory.__main__ import main
sys.exit(main(["chat", *sys.argv[1:]]))
"""


class TerminalSession:
    """`repertory chat` at a terminal of its own, which turns Ctrl-C into a signal: what is typed, what is shown."""

    def __init__(self, *arguments, temporary):
        self.master, self.terminal = pty.openpty()
        self.settings = termios.tcgetattr(self.terminal)
        self.shown = b""
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", AT_ITS_TERMINAL, *arguments],
            stdin=self.terminal, stdout=self.terminal, stderr=self.terminal, cwd=temporary,
            env={**os.environ, "TMPDIR": temporary, "TERM": "dumb"}, start_new_session=True,
        )  # fmt: skip

    def type(self, text):
        os.write(self.master, text.encode())

    def wait_for(self, text):
        """Read up to and with `text`."""
        while text not in self.shown:
            self.read_more()
        before, _, self.shown = self.shown.partition(text)
        return before

    def read_more(self):
        """Wait for something to be shown."""
        assert select.select([self.master], [], [], LIMIT_S)[0], f"nothing came after {self.shown!r}"
        self.shown += os.read(self.master, 65536)

    def interrupt_until_it_ends(self):
        """Press Ctrl-C at the prompt, again where it came before readline was listening: that one is lost in CPython."""
        for _ in range(LIMIT_S):
            self.type(CTRL_C)
            try:
                return self.process.wait(1.0)
            except subprocess.TimeoutExpired:
                continue
        raise AssertionError("the program does not end")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.terminal)


@pytest.fixture
def at_terminal():
    """Starts a session whose temporary files are in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="chat-") as temporary:
        sessions = []

        def start(*arguments):
            sessions.append(TerminalSession(*arguments, temporary=temporary))
            return sessions[-1]

        yield start
        for session in sessions:
            session.close()
        assert os.listdir(temporary) == []


def descendants(pid):
    """Processes whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def test_at_a_terminal_ctrl_c_ends_a_reply_then_the_program_and_nothing_is_left(tiny_model, at_terminal):
    session = at_terminal("--model", str(tiny_model), "--ignore-eos", "--max-tokens", "4000", "--num-threads", "1")
    session.wait_for(b"> ")
    hosts = descendants(session.process.pid)
    assert len(hosts) == 1
    session.type("hello\n")
    session.wait_for(b"hello\r\n")
    session.read_more()  # the first of thousands of random pieces
    session.type(CTRL_C)
    session.wait_for(b"[ended]\r\n> ")
    session.type("/stats\n")
    assert b" 0 restarts" in session.wait_for(b"\r\n> ") + session.shown
    assert session.interrupt_until_it_ends() == 130
    assert not any(Path(f"/proc/{host}").exists() for host in hosts)
    assert termios.tcgetattr(session.terminal) == session.settings


def test_at_a_terminal_ctrl_d_ends_the_program(paper_model, at_terminal):
    session = at_terminal("--model", str(paper_model), "--device", "simulated", "--worker", "inline")
    session.wait_for(b"> ")
    session.type(CTRL_D)
    assert session.process.wait(LIMIT_S) == 0
    assert termios.tcgetattr(session.terminal) == session.settings
