"""Public traces: known by their first line, read whole, refused with the line and the field that is wrong."""

from __future__ import annotations

import json

import pytest

from repertory.actors.simulation.formats import MOONCAKE_BLOCK, detect, load, mooncake_lines
from repertory.actors.simulation.generators import Shape, chats
from repertory.protocol.errors import ValidationError

MOONCAKE = [
    {"timestamp": 5000, "input_length": 1030, "output_length": 20, "hash_ids": [46, 47, 48]},
    {"timestamp": 2000, "input_length": 1100, "output_length": 10, "hash_ids": [46, 47, 2303]},
    {"timestamp": 2500, "input_length": 600, "output_length": 1, "hash_ids": [7]},
    {"timestamp": 9000, "input_length": 512, "output_length": 0, "hash_ids": [7]},
]
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,Conversation log\n118,GPT-4,50,0,50,API log\n"
)
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
AZURE_2024 = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "trace"
        path.write_text(text if isinstance(text, str) else "".join(json.dumps(line) + "\n" for line in text))
        return path

    return write


def shared(one, other):
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize(
    ("text", "name"), [(MOONCAKE, "mooncake"), (BURSTGPT, "burstgpt"), (AZURE, "azure"), ("\ufeff" + AZURE, "azure")]
)
def test_formats_are_known_by_their_first_line(written, text, name):
    assert detect(written(text)) == name


def test_mooncake_prompts_share_the_blocks_that_their_ids_have_in_common(written):
    found = load(written(MOONCAKE), "mooncake")
    assert [(job.arrival_s, job.num_prompt_tokens, job.outputs[0].length) for job in found.jobs] == [
        (0.0, 1100, 10),
        (0.5, 600, 1),
        (3.0, 1030, 20),
    ]
    assert found.num_left_out == 1
    first, other, last = (job.prompt() for job in found.jobs)
    assert [len(prompt) for prompt in (first, other, last)] == [1100, 600, 1030]
    assert (shared(first, last), shared(first, other)) == (2 * MOONCAKE_BLOCK, 0)
    assert other[MOONCAKE_BLOCK:] != first[MOONCAKE_BLOCK:600]


def test_the_tables_of_burstgpt_and_azure_are_read_and_failed_requests_left_out(written):
    found = load(written(BURSTGPT), "burstgpt")
    assert [(job.arrival_s, job.num_prompt_tokens, job.max_tokens) for job in found.jobs] == [(0, 472, 18), (40, 1087, 230)]
    assert found.num_left_out == 1
    assert shared(*(job.prompt() for job in found.jobs)) == 0
    azure = load(written(AZURE), "azure").jobs
    assert [(job.num_prompt_tokens, job.max_tokens) for job in azure] == [(4808, 10), (3180, 8)]
    assert azure[1].arrival_s == pytest.approx(0.052)
    assert load(written(AZURE_2024), "azure").jobs[0].num_prompt_tokens == 2162


@pytest.mark.parametrize(
    ("format", "text", "words"),
    [
        ("mooncake", [MOONCAKE[0], {"timestamp": 1, "output_length": 3}], "line 2: .*input_length"),
        ("mooncake", [{**MOONCAKE[0], "input_length": "many"}], r"line 1: .*input_length"),
        ("mooncake", [{**MOONCAKE[0], "output_length": -1}], "line 1: output_length: -1 is not allowed"),
        ("mooncake", [{**MOONCAKE[0], "input_length": 100}], "line 1: hash_ids: 3 blocks for 100 tokens, at most 1 fit"),
        ("mooncake", '{"timestamp": 1,\n', "line 1: "),
        ("burstgpt", BURSTGPT + "7,GPT-4,x,3,4,log\n", "line 5: request tokens: nan is not allowed"),
        ("burstgpt", BURSTGPT + "7,GPT-4\n", "line 5: 2 columns where the header has 6"),
        ("burstgpt", AZURE, "line 1: there is no column 'request tokens' among timestamp, contexttokens"),
        ("azure", AZURE + "yesterday,1,2\n", "line 4: TIMESTAMP: .*yesterday.* is no date and time"),
    ],
)
def test_what_is_wrong_is_said_with_its_line_and_field(written, format, text, words):
    with pytest.raises(ValidationError, match=words):
        load(written(text), format)


@pytest.mark.parametrize("text", ["", "a,b,c\n", "[1]\n", '{"prompt": "hi"}\n'])
def test_an_unknown_kind_is_refused_with_those_that_are_known(written, text):
    with pytest.raises(ValidationError, match="known are repertory's own, mooncake, burstgpt, azure"):
        detect(written(text))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValidationError, match="No such file"):
        detect(tmp_path / "nothing")


def test_what_is_written_as_mooncakes_reads_back_with_the_same_lengths_and_whole_blocks_shared(tmp_path):
    jobs = chats(Shape(count=60, rate=2.0, input_len=900, output_len=100, prefix_len=1500, seed=5))
    path = tmp_path / "written.jsonl"
    path.write_bytes(b"".join(mooncake_lines(jobs)))
    back = load(path, detect(path)).jobs
    assert [(job.num_prompt_tokens, job.outputs[0].length) for job in back] == [
        (job.num_prompt_tokens, job.outputs[0].length) for job in jobs
    ]
    for i, j in [(0, 1), (3, 17), (20, 40), (10, 55)]:
        real, read = shared(jobs[i].prompt(), jobs[j].prompt()), shared(back[i].prompt(), back[j].prompt())
        assert read == real or read == real // MOONCAKE_BLOCK * MOONCAKE_BLOCK
