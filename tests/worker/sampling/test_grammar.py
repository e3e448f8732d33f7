"""Outputs under a grammar: always a text of it, whatever the logits; and nothing else about them changes."""

import contextlib
import hashlib
import itertools
import json
import os
import queue
import re
import resource
import select
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jsonschema_rs
import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mini_engine import demo
from mini_engine.config import BUNDLED_MODEL
from mini_engine.messages import Grammar, GrammarReady, NewSequence, Problem, SamplingParams
from mini_engine.model.config import ModelConfig
from mini_engine.protocol.structured_outputs import choice_grammar, json_grammar, json_value, regex_grammar
from mini_engine.worker.batch import SequenceState
from mini_engine.worker.sampling import grammar_process, sampler
from mini_engine.worker.sampling.grammar import Grammars, Masks, bars_of
from mini_engine.worker.sampling.grammar_process import KILLED, LARGE, SLOW_COMPILE, SLOW_MASK, private_bytes
from mini_engine.worker.sampling.matchers import PROBLEM, MaskVocabulary, Matchers, Row
from mini_engine.worker.sampling.penalties import BARRED
from tests.support import script, tiny
from tests.support.grammars import REGEXES, SCHEMAS

TOKENIZER = Path(demo.__file__).parent / "weights" / "tokenizer.json"
TEXT = Tokenizer.from_file(str(TOKENIZER))
ENDS = [754, 756]
VOCABULARY = 800  # of the logits: more than the tokenizer has
STOPS = [*ENDS, VOCABULARY - 1]
ROWS = 8
WORDS = MaskVocabulary(TOKENIZER, os.memfd_create("masks"), ROWS)
VISION = ModelConfig.from_dir(BUNDLED_MODEL).vision
INTEGER = {"type": "integer"}
HONEST, SLOW = "start: /[a-z ]+/", "start: T\nT: ~/(?s:.*a.{30}.*)/ & /(?s:.*b.{30})/"  # to compile


class GrammarRank(Grammars):
    """Grammars as rank 0 has them, each followed by one output."""

    def __init__(self, rows: int = ROWS) -> None:
        self.reports = queue.SimpleQueue[GrammarReady]()
        super().__init__(TOKENIZER, rows, "tests", self.reports.put)

    def compile(self, *grammars: str) -> list[Problem | None]:
        """The problem of each."""
        self.update([order(grammar) for grammar in grammars], [])
        problems = {report.digest: report.problem for report in (self.reports.get(timeout=60) for _ in grammars)}
        return [problems[digest(grammar)] for grammar in grammars]

    def follow(self, outputs: Mapping[str, Sequence[int]]) -> list[Problem | torch.Tensor]:
        """The problem of each output, by its grammar, or its bars. `outputs`: what is new of each."""
        rows = [Row(digest(text), text, [*output], STOPS) for text, output in outputs.items()]
        masks, problems = self.masks(dict(enumerate(rows)))
        assert masks is not None
        bars = dict(zip(masks.rows, masks.bars, strict=True))
        return [problems[i] if i in problems else bars[i] for i in range(len(rows))]

    def masks(self, rows: Mapping[int, Row], seconds: float = 0.0) -> tuple[Masks | None, dict[int, Problem]]:
        self.request_masks(rows, seconds)
        return self.receive_masks()

    def finish(self, *grammars: str) -> None:
        names = [*map(digest, grammars)]
        self.update([], names, [*zip(names, grammars, strict=True)])

    def processes(self) -> list[int]:
        manager = self.manager.pid
        return [int(pid) for pid in Path(f"/proc/{manager}/task/{manager}/children").read_text().split()]


def order(grammar: str, client: bytes = b"") -> Grammar:
    return Grammar(digest(grammar), grammar, client, number=len(grammar))


def digest(grammar: str) -> bytes:
    return hashlib.blake2b(grammar.encode(), digest_size=16).digest()


@pytest.fixture(scope="module")
def rank() -> Iterator[GrammarRank]:
    with contextlib.closing(GrammarRank()) as rank:
        yield rank


@given(st.lists(REGEXES | SCHEMAS, min_size=ROWS, max_size=ROWS, unique_by=str), st.integers(0, 1000))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_outputs_match_their_regular_expressions_and_schemas(forms, number):
    """Eight in one batch, each with a grammar of its own. JSON takes at most twice the tokens of its compact form.
    Without processes, for speed."""
    grammars = [regex_grammar(form) if isinstance(form, str) else json_grammar(form) for form in forms]
    params = [SamplingParams(max_tokens=300, temperature=1.5, seed=number + i) for i in range(ROWS)]
    samplings, outputs = [sampler.RowSampling.of(each) for each in params], [list[int]() for _ in params]
    logits = torch.Generator().manual_seed(number)
    matchers = [Matchers(WORDS, grammar) for grammar in grammars]
    for place in range(300):
        live = [i for i, output in enumerate(outputs) if not {*output} & {*ENDS}]
        if not live:
            break
        for i in live:
            assert matchers[i].fill([(i, Row(b"", "", outputs[i][-1:], STOPS))]) == {i: None}
        scores = 4 * torch.randn(ROWS, VOCABULARY, generator=logits)
        scores = Masks(live, bars_of(WORDS.masks, ROWS, live)).apply(scores)
        chosen = sampler.sample(scores, samplings, [place] * ROWS).tokens
        for i in live:
            outputs[i].append(int(chosen[i]))
    for form, (*tokens, end) in zip(forms, outputs, strict=True):
        text = TEXT.decode(tokens, skip_special_tokens=False)
        if isinstance(form, str):
            assert re.fullmatch(form, text)
        else:
            assert jsonschema_rs.is_valid(form, json.loads(text))
            compact = re.sub(r"(?<=[,:]) ", "", text)
            assert len(TEXT.encode(text).ids) <= 2 * len(TEXT.encode(compact).ids)
        assert end in ENDS and not {*tokens} & {*ENDS}


def bars_after(matchers: Matchers, output: Sequence[int], words: MaskVocabulary = WORDS) -> torch.Tensor:
    assert matchers.fill([(0, Row(b"", "", [*output], STOPS))]) == {0: None}
    matchers.drop([""])
    return bars_of(words.masks, words.rows, [0])[0]


def follows(grammar: str, *parts: str) -> bool:
    """Whether the text can be sampled, by the tokens of each part, and then an end."""
    matchers, tokens = Matchers(WORDS, grammar), [*itertools.chain(*(TEXT.encode(part).ids for part in parts)), ENDS[0]]
    return not any(bars_after(matchers, tokens[:i])[token] for i, token in enumerate(tokens))


@pytest.mark.parametrize(("kind", "schema", "before", "after"), [
    ("integer", INTEGER, "", ""),
    ("number", {"type": "number"}, "", ""),
    ("integer", {"type": ["integer", "null"]}, "", ""),
    ("integer", {"items": INTEGER}, "[1, ", "]"),
    ("integer", {"prefixItems": [{"anyOf": [INTEGER, {"type": "string"}]}], "items": False}, "[", "]"),
    ("integer", {"additionalProperties": {"$ref": "#/$defs/n"}, "$defs": {"n": INTEGER}}, '{"a":', "}"),
    ("integer", {"patternProperties": {"^n": INTEGER}}, '{"n\\"": ', "}"),
    ("integer", {"properties": {"type": INTEGER, "$ref": {"items": {"$ref": "#"}}}, "required": ["type"]},
     '{"type": 1, "$ref":[{"type": ', "}]}"),
    ("number", {"type": "object"}, '{"a": [true, {"b\\\\": ', "}]}"),  # as for `json_object`
])  # fmt: skip
def test_numbers_of_json_fit_64_bits(kind, schema, before, after):
    good, bad = [f"{2**63 - 1}", f"{1 - 2**63}", "-0", "9" * 18], [f"{2**63}", f"{-(2**63)}", "1" * 41]
    if kind == "number":
        good += ["6.02e23", "6.6e-34", "1E+5", "0." + "1" * 17]
        bad += ["1e100", "1e-001", "0." + "1" * 18, "0." + "1" * 41]
    assert [text for text in [*good, *bad] if follows(json_grammar(schema), before + text + after)] == good


@pytest.mark.parametrize(("schema", "before", "good", "bad", "after"), [
    ({"type": ["integer", "null"]}, "", ["null"], ["nul"], ""),
    ({"type": "integer", "multipleOf": 7}, "", ["7", "1" * 19 + "4"], ["8", "9" * 21], ""),  # "1" * 19 has to go on
    ({"type": "integer", "minimum": 0, "maximum": 10**40}, "", [f"{2**63 - 1}"], [f"{2**63}", "-1", "1" * 41], ""),
    ({"type": "number", "minimum": 0, "maximum": 1}, "", ["0." + "1" * 17], ["0." + "1" * 18], ""),
    ({"type": "number", "multipleOf": 0.01}, "", ["1.25", "9" * 18 + ".25"], [f"{2**63}", "1" * 41, "1.255"], ""),
    ({"type": "string"}, '"', [f"{2**63}", "e" + "1" * 41, "\\\\" + "1" * 41], ["\\" + "1" * 41], '"'),
    ({"type": "string", "pattern": r"^\d*,$"}, '"', ["1" * 41 + ","], ["1,2"], '"'),
    ({"const": {"id": "1" * 41}}, '{"id": "', ["1" * 41], ["1"], '"}'),
])  # fmt: skip
def test_texts_and_bounded_numbers_of_json_are_as_long_as_the_schema_allows(schema, before, good, bad, after):
    assert [text for text in [*good, *bad] if follows(json_grammar(schema), before + text + after)] == good


def test_tokens_of_several_digits(tmp_path):
    """In the place of the last words of the vocabulary."""
    digits = ["80", "807", "808", "0" * 16]
    tokenizer = json.loads(TOKENIZER.read_text())
    model = tokenizer["model"]
    words = sorted(model["vocab"], key=model["vocab"].get)
    model["vocab"] = {word: i for i, word in enumerate([*words[: -len(digits)], *digits])}
    model["merges"] = model["merges"][: -len(digits)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    words = MaskVocabulary(tmp_path / "tokenizer.json", os.memfd_create("masks"), 1)
    matchers = Matchers(words, json_grammar({"type": "number"}))
    for text, may_follow in [
        ("12", digits), ("1.5", digits), ("9223372036854775", digits[:2]), ("-9223372036854775", digits[:2]),
        ("92233720368547758", []), ("0." + "1" * 15, digits[:1]), ("1e", digits[:1]), ("1e-", digits[:1]),
    ]:  # fmt: skip
        bars = bars_after(matchers, [model["vocab"][character] for character in text], words)
        assert [token for token in digits if not bars[model["vocab"][token]]] == may_follow, text


def test_numbers_of_a_thought_may_have_any_length():
    """And its quotes need not be paired."""
    grammar = f"start: /(.|\\n)*/ <|im_start|> {json_value(INTEGER)}"
    answers = [f'5" and {"1" * 41}<|im_start|>{number}' for number in (2**63 - 1, 2**63)]
    assert [follows(grammar, answer) for answer in answers] == [True, False]


def test_the_text_of_a_control_token_is_text():
    text, false = "x<|im_end|>y", '%llguidance {"no_forcing": false}\n'
    grammars = choice_grammar([text]), false + choice_grammar([text]), regex_grammar(re.escape(text))
    assert all(follows(grammar, *text) and not follows(grammar, text) for grammar in grammars)
    assert follows(json_grammar({"const": text}), *f'"{text}"')


def test_a_complete_grammar_ends_even_below_min_tokens(rank):
    """Where it may go on it does."""
    grammar = regex_grammar("r{1,3}")
    assert rank.compile(grammar) == [None]
    sampling = SamplingParams(max_tokens=9, seed=1, stop_token_ids=ENDS, grammar=digest(grammar))
    state = SequenceState(NewSequence("r", [0], sampling, []), VISION, 16)
    for stop in (1, 2, 3, 4):
        masks, problems = rank.masks({0: state.grammar_row(stop)})
        assert not problems
        logits = torch.zeros(1, VOCABULARY).index_fill(1, torch.tensor(ENDS), BARRED)
        state.tokens[stop] = int(masks.apply(logits).argmax())
    assert TEXT.decode(state.tokens[1:4]) == "rrr" and state.tokens[4] in ENDS
    assert state.grammar_row(5) is None
    rank.finish(grammar)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_grammar_that_allows_all_changes_no_token(temperature, make_runner, rank):
    """With every second request under it: alone and in company, ahead of the device, after a preemption."""
    results, everything = [], "start: <[*]>*"
    assert rank.compile(everything) == [None]
    for grammar in (b"", digest(everything)):
        media = tiny.MemoryMedia()
        requests = tiny.mixed_requests(media, temperature=temperature, seed=3)
        for i in range(0, len(requests), 2):
            sampling = msgspec.structs.replace(requests[i].sampling, grammar=grammar)
            requests[i] = msgspec.structs.replace(requests[i], sampling=sampling)
        runner = make_runner(media)
        runner.grammars = rank
        steps = script.write_steps(requests, 20, 64, (9, 14))
        results.append(script.run(runner, steps, ahead=1))
    assert results[0] == results[1]


def ambiguous(count: int) -> str:
    """Masks take time by the cube of `count`, and more with each token."""
    rules = "\n".join(f"n{i}: /[a-z ]/" for i in range(count))
    return f's: {" | ".join(f"n{i} s" for i in range(count))} | ""\n{rules}'


def test_a_grammar_that_takes_too_much_fails_alone(rank):
    """While it is compiled, or later at a token, and it is refused from then on. Another keeps its masks."""
    lists = [{"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 0}] * 600
    never_compiled = {
        SLOW: f"{SLOW_COMPILE.text}|{LARGE.text}",
        f"start: s\n{ambiguous(650)}": SLOW_COMPILE.text,
        json_grammar({"$defs": {"n": {"anyOf": lists}}, "$ref": "#/$defs/n"}): SLOW_COMPILE.text,
        f'start: {"(" * 20000}"a"{")" * 20000}': PROBLEM.format("1.37.: lark grammar too deeply nested [^|]*"),
        "start: <|unknown|>": PROBLEM.format(".*unknown special token.*"),
    }
    never_ending = f'start: "~~" s\n{ambiguous(650)}'
    outputs = [TEXT.encode(text).ids for text in ("", "red", " blue")]
    assert rank.compile(HONEST) == [None]
    before = rank.processes()
    assert rank.compile(never_ending) == [None]
    alone = [rank.follow({HONEST: output})[0] for output in outputs]
    rank.update([], [], [(digest(HONEST), HONEST)])
    for problem, expected in zip(rank.compile(*never_compiled), never_compiled.values(), strict=True):
        assert problem and re.fullmatch(expected, problem.text) and not problem.retry
    tilde = TEXT.encode("~").ids
    for output, bars, hostile in zip(outputs, alone, ([], tilde, tilde), strict=True):
        other, unchanged = rank.follow({never_ending: hostile, HONEST: output})
        assert torch.equal(unchanged, bars)
    assert other == SLOW_MASK
    assert rank.follow({never_ending: hostile}) == rank.compile(never_ending) == [SLOW_MASK]
    assert {*rank.processes()} <= {*before}
    rank.finish(HONEST)


def test_a_grammar_that_takes_too_much_memory_fails():
    """Longer than users may send: which limit those reach first depends on the machine."""
    with contextlib.closing(GrammarRank(rows=1)) as rank:
        assert rank.compile(f'start: "{"a" * (32 << 20)}"') == [LARGE]


def test_a_grammar_that_delays_each_step_a_little_fails_in_time():
    """Not what it takes while the model computes. The next grammar of its client waits, those of others do not."""
    grammar = f"start: s\n{ambiguous(60)}"
    with contextlib.closing(GrammarRank(rows=1)) as rank:
        assert rank.compile(grammar) == [None]
        for seconds, most in ((1.0, 4), (0.0, 30)):
            for _ in range(1, most):
                row = Row(digest(grammar), grammar, TEXT.encode("a").ids, STOPS)
                _, problems = rank.masks({0: row}, seconds)
                if problems:
                    break
            assert bool(problems) == (seconds == 0)
        assert problems == {0: SLOW_MASK}
        rank.update([order("start: /a/"), order("start: /b/", b"other")], [])
        assert rank.reports.get(timeout=60).digest == digest("start: /b/") and rank.reports.empty()


def test_outputs_may_end_and_go_on_while_their_process_hardly_runs():
    """As on a busy machine: it runs for a moment before each time that the manager looks, and is not killed."""
    with contextlib.closing(GrammarRank(rows=2)) as rank:
        assert rank.compile(HONEST) == [None]
        (process,) = rank.processes()
        rank.follow({HONEST: []})
        os.kill(process, signal.SIGSTOP)
        rank.update([], [], [(digest(HONEST), HONEST)])
        rank.request_masks({0: Row(digest(HONEST), HONEST, [], STOPS)})
        for _ in range(3):
            os.kill(process, signal.SIGCONT)
            os.kill(process, signal.SIGSTOP)
            while ") T " not in Path(f"/proc/{process}/stat").read_text():
                time.sleep(0.001)
            rank._send(grammar_process.ManagerRequest(stalled=[digest(HONEST)]))
            rank.compile("start: <|unknown|>")  # reported after that
        os.kill(process, signal.SIGCONT)
        assert not rank.receive_masks()[1]


def test_answers_that_rank_0_does_not_receive_block_nothing():
    """As that of a process which is killed between steps: it receives in steps alone, and a socket holds few."""
    rows = {i: Row(digest(HONEST), str(i), [], STOPS) for i in range(4000)}
    with contextlib.closing(GrammarRank(rows=4000)) as rank:
        assert rank.compile(HONEST) == [None]
        assert not rank.masks(rows)[1]
        rank.finish(HONEST)
        for _ in range(500):
            rank.request_masks({0: rows[0]})
        assert rank.compile("start: /a+/") == [None]
        assert rank.masks(rows)[1] == dict.fromkeys(rows, KILLED)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_ends_one_grammar(end):
    """A grammar's process holds no descriptor but its own. Without the manager the rank cannot go on."""
    before = os.listdir("/proc/self/fd")
    with contextlib.closing(GrammarRank(rows=2)) as rank:
        assert rank.compile("start: /a+/") == [None]
        (lost,) = rank.processes()
        assert rank.compile(HONEST) == [None]
        assert len(os.listdir(f"/proc/{lost}/fd")) == 5
        assert Path(f"/proc/{lost}/oom_score_adj").read_text() == "1000\n"
        os.kill(lost, end)
        problem, bars = rank.follow({"start: /a+/": [], HONEST: []})
        assert problem == KILLED and problem.retry and not bars.all()
        rank.finish("start: /a+/")
        assert rank.compile("start: /a+/") == [None]  # it was not at fault
        other = rank.processes()[-1]
        rank.manager.kill()
        with pytest.raises(RuntimeError, match="the grammar manager exited"):
            rank.follow({HONEST: []})
        while Path(f"/proc/{other}").exists():
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match="the grammar manager exited"):
            rank.update([], [])
    assert os.listdir("/proc/self/fd") == before


def test_a_process_that_is_stopped_while_it_compiles_ends_one_grammar():
    with contextlib.closing(GrammarRank(rows=2)) as rank:
        rank.update([order(SLOW)], [])
        while not rank.processes():
            time.sleep(0.001)
        os.kill(*rank.processes(), signal.SIGSTOP)
        rank.update([order(HONEST)], [])  # of the same client
        assert [rank.reports.get(timeout=60).problem for _ in range(2)] == [KILLED, None]


def test_clients_do_not_wait_for_the_grammars_of_others():
    """Of one client at most as many are in use as there are rows."""
    grammars = [f"start: /{letter}+/" for letter in "abc"]
    with contextlib.closing(GrammarRank(rows=1)) as rank:
        assert rank.compile(grammars[0]) == [None]
        rank.update([order(grammars[1]), order(grammars[2], b"other")], [])
        assert rank.reports.get(timeout=60).digest == digest(grammars[2]) and rank.reports.empty()
        rank.finish(grammars[0])
        assert rank.reports.get(timeout=60).digest == digest(grammars[1])
        resource.prlimit(rank.manager.pid, resource.RLIMIT_NOFILE, (3, 3))
        text = "The grammar of this request gets no process: Too many open files; send the request again later."
        for unused in (grammars[1:], []):  # whose memory cannot be read
            rank.update([order(grammars[0], b"third")], [])
            assert rank.reports.get(timeout=60).problem == Problem(text, retry=True)
            rank.finish(*unused)
        assert not rank.processes()


def test_idle_processes_are_given_up_where_a_new_one_lacks_what_they_hold():
    with contextlib.closing(GrammarRank(rows=3)) as rank:
        assert rank.compile("start: /a+/", "start: /b+/") == [None, None]
        before, manager = rank.processes(), rank.manager.pid
        rank.finish("start: /a+/", "start: /b+/")
        assert rank.compile("start: /a+/", "start: /b+/") == [None, None] and rank.processes() == before, "not kept"
        rank.finish("start: /b+/")
        rank.finish("start: /a+/")
        used = os.listdir(f"/proc/{manager}/fd")
        limit = 1 + next(fd for fd in itertools.count() if f"{fd}" not in used)  # one is left, and a fork needs two
        resource.prlimit(manager, resource.RLIMIT_NOFILE, (limit, limit))
        assert rank.compile("start: /c+/") == [None]
        assert len({*before} & {*rank.processes()}) == 1


def test_the_process_of_an_unused_grammar_follows_it_again_or_another():
    """Without the outputs before; and a grammar has as much memory as in a new process."""
    grammar, other = "start: /ab+/", f"start: /cd+/\n// {'x' * 100_000}"
    with contextlib.closing(GrammarRank(rows=1)) as rank:
        assert rank.compile(grammar) == [None]
        (process,) = rank.processes()
        before = private_bytes(process)
        for _ in range(200):
            row = Row(digest(grammar), grammar, TEXT.encode("a" + 200 * "b").ids, STOPS)
            assert not rank.masks({0: row})[1]
            rank.finish(grammar)
            assert rank.compile(grammar) == [None]
        assert private_bytes(process) - before < 1 << 20
        for text, next_text in ((grammar, other), (other, grammar)):
            (bars,) = rank.follow({text: []})
            assert torch.equal(bars, bars_after(Matchers(WORDS, text), []))
            unused = private_bytes(process) + (1 << 20)  # what receives the next grammar
            rank.finish(text)
            assert rank.compile(next_text) == [None]
            assert 0 < resource.prlimit(process, resource.RLIMIT_DATA)[0] - grammar_process.MEMORY_BYTES <= unused
        assert rank.processes() == [process]


def test_a_process_that_compiles_has_much_memory_was_killed_or_cannot_receive_a_grammar_is_replaced():
    large = f'start: "{"e" * 3_000_000}"'
    with contextlib.closing(GrammarRank(rows=1)) as rank:
        rank.update([order(SLOW)], [])
        while not rank.processes():
            time.sleep(0.001)
        rank.finish(SLOW)
        assert rank.compile(large) == [None]
        before = rank.processes()
        rank.finish(large)
        assert rank.compile(HONEST) == [None]
        (lost,) = rank.processes()
        assert lost not in before
        rank.finish(HONEST)
        exited = os.pidfd_open(lost)
        os.kill(lost, signal.SIGKILL)
        select.select([exited], [], [])
        os.close(exited)
        assert rank.compile(HONEST) == [None]
        assert rank.processes() != [lost] and len(rank.processes()) == 1
        rank.finish(HONEST)
        assert rank.compile(f"{HONEST}\n// {'x' * 500_000}") == [None]  # a socket takes less at once
