"""Hostile tokenizers and chat templates: nothing is executed, nothing hangs, one line tells it."""

import json

import pytest

from care_jax.batch import Example, Unusable
from care_jax.data.drawn import synthetic
from care_jax.prompts import release_tokenizer, templates
from care_jax.prompts.builder import PromptBuilder, backbone_config
from care_jax.prompts.release_tokenizer import load_tokenizer
from care_jax.prompts.tokenizer import CHAT_TEMPLATE, build_tokenizer
from configs import tiny

TURNS = [{"role": "user", "content": "1 < 2?"}]
FOR = "{% for a in range(99999) %}"
LOOP = 4 * FOR + 4 * "{% endfor %}"
DOUBLE = (
    "{% set n = namespace(s=START) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}"
)
EXCEPTIONS = {  # of what a template does
    "allocates": ("{{ 'a' * 10**11 }}", "MemoryError"),
    "doubles a text": (DOUBLE.replace("START", "'ab'"), "MemoryError"),
    "doubles a list": (DOUBLE.replace("START", "[1]"), "MemoryError"),
    "pads": ("{{ 'a' | center(10**11) }}", "MemoryError"),
    "recurses": ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "nests": ("{{ " + 5000 * "(" + 5000 * ")" + " }}", "RecursionError"),
    "writes very much": ("{{ 'a' * 2000000 }}", "a prompt of 2000000 characters"),
    "reads a file": ("{% include '/etc/passwd' %}", "no loader"),
    "imports": ("{% import '/etc/passwd' as x %}", "no loader"),
    "reaches for classes": ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    "reaches for modules": ("{{ cycler.__init__.__globals__.os }}", "SecurityError"),
    "reaches by name": ("{{ ('' | attr('__class__')).x }}", "SecurityError"),
    "is no template": ("{% if %}", "TemplateSyntaxError"),
    "raises two lines": ("{{ raise_exception('no\nway') }}", "TemplateError (no way)"),
}


@pytest.fixture
def hurried(monkeypatch):
    """A process with little time."""
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.3)
    templates._renderer.cache_clear()
    yield
    templates._renderer.cache_clear()


def render(template):
    return templates.render(template, TURNS, is_trusted=False, bos_token="<s>")


@pytest.mark.parametrize(("template", "message"), EXCEPTIONS.values(), ids=EXCEPTIONS)
def test_a_template_reads_nothing_and_its_memory_is_limited(template, message):
    with pytest.raises(templates.TemplateError) as error:
        render(template)
    assert message in str(error.value) and str(error.value).isprintable()
    assert render("{{ bos_token }}{{ messages[0].content }}") == "<s>1 < 2?"


@pytest.mark.parametrize("template", [LOOP, "{{ 10 ** (10 ** 10) }}"], ids=["loop", "power"])
def test_a_template_that_does_not_end_is_told_in_one_line(hurried, template):
    message = r"^the chat template must write a prompt, and did not end within 0.3 s; use .*$"
    with pytest.raises(ValueError, match=message):
        render(template)
    assert render("{{ messages[0].content }}") == "1 < 2?"


def test_the_process_renders_what_this_one_does():
    for template in (CHAT_TEMPLATE, "{{ bos_token }}{{ messages | tojson }}{{ date_string }}"):
        one, other = (
            templates.render(template, TURNS, is_trusted=is_trusted, bos_token="é\u2028\n")
            for is_trusted in (True, False)
        )
        assert one == other


@pytest.fixture
def folder(tmp_path):
    """A tokenizer, with its template in tokenizer_config.json."""
    build_tokenizer(synthetic.texts()).save_pretrained(tmp_path, save_jinja_files=False)
    return tmp_path


def edit(path, change):
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def make_builder(folder):
    tokenizer = load_tokenizer(str(folder))
    config = backbone_config(tiny.get_config().model.backbone.to_dict(), tokenizer)
    sizes = {"min_pixels": 256, "max_pixels": 4096, "buckets": ((96, 64),)}
    return PromptBuilder(tokenizer, config, **sizes)


def refusal(folder):
    with pytest.raises(ValueError) as error:
        make_builder(folder)
    assert str(error.value).isprintable() and len(str(error.value)) < 1000
    return str(error.value)


def test_a_template_that_loops_stops_when_it_is_opened(folder, hurried):
    (folder / "chat_template.jinja").write_text(LOOP)
    assert "did not end within" in refusal(folder)


def test_a_question_that_a_template_refuses_is_left_out(folder):
    refuse = "{% if 'odd' in messages | tojson %}{{ raise_exception('odd') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(refuse + CHAT_TEMPLATE)
    builder = make_builder(folder)
    assert builder.tokenize(Example("1", "made", (), "Even?", "1")).tokens.size
    with pytest.raises(Unusable, match="the chat template refuses the question") as error:
        builder.tokenize(Example("2", "made", (), "An odd one?", "1"))
    assert error.value.detail == "TemplateError (odd)"


def test_code_of_a_release_is_never_run(folder, monkeypatch):
    """Not even if the user would say yes, as transformers asks."""
    monkeypatch.setattr("builtins.input", lambda _: "y")
    (folder / "own.py").write_text(f"open({str(folder / 'run')!r}, 'w')\nclass Own: pass\n")
    edit(
        folder / "tokenizer_config.json",
        lambda fields: fields.update(auto_map={"AutoTokenizer": ["own.Own", "own.Own"]}),
    )
    maps = {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None]}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": maps}))
    try:
        make_builder(folder)  # opened without it
    except ValueError as error:
        assert "\n" not in str(error)
    assert not (folder / "run").exists()


def nested(path):
    path.write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")


def replaced(found, written, kind="String"):
    return {"type": "Replace", "pattern": {kind: found}, "content": written}


def grow(fields):
    parts = [replaced(".", "a" * 9, "Regex")] * 20
    fields["normalizer"] = {"type": "Sequence", "normalizers": parts}


@pytest.mark.parametrize(
    ("parts", "growth"),
    [
        ([], 1),
        ([{"type": "NFC"}, {"type": "Lowercase"}], 1),
        ([{"type": "Prepend", "prepend": "_"}, replaced(" ", "_")], 2),  # Llama 2's
        ([replaced("ab", "abcd"), replaced("x", "yyy")], 6),
        ([replaced(".", "aa", "Regex")] * 3, 27),
    ],
)
def test_a_normaliser_is_known_by_how_much_it_writes(parts, growth):
    assert release_tokenizer._growth({"type": "Sequence", "normalizers": parts}) == growth


def far(fields):
    vocab = fields["model"]["vocab"]
    vocab[min(vocab, key=vocab.get)] = 2**32 - 1


TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
BROKEN = {
    "nested": lambda folder: nested(folder / TOKENIZER),
    "nested settings": lambda folder: nested(folder / SETTINGS),
    "nested processor": lambda folder: nested(folder / "processor_config.json"),
    "a list": lambda folder: (folder / SETTINGS).write_text("[]"),
    "a number": lambda folder: (folder / SETTINGS).write_text("5"),
    "not UTF-8": lambda folder: (folder / SETTINGS).write_bytes(b"\xff\xfe{}"),
    "a map of code": lambda folder: edit(folder / SETTINGS, lambda x: x.update(auto_map=5)),
    "a class": lambda folder: edit(folder / SETTINGS, lambda x: x.update(tokenizer_class=5)),
    "no model": lambda folder: edit(folder / TOKENIZER, lambda x: x.update(model=None)),
    "a vocabulary of texts": lambda folder: edit(
        folder / TOKENIZER, lambda x: x["model"].update(vocab={"a": "b"})
    ),
    "ids beyond the vocabulary": lambda folder: edit(folder / TOKENIZER, far),
    "texts that grow": lambda folder: edit(folder / TOKENIZER, grow),
    "templates": lambda folder: edit(folder / SETTINGS, lambda x: x.update(chat_template=[5])),
    "a number as template": lambda folder: edit(
        folder / SETTINGS, lambda x: x.update(chat_template=5)
    ),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
def test_a_tokenizer_that_lies_is_refused(folder, damage):
    (folder / "config.json").write_text("{}")
    damage(folder)
    refusal(folder)


def test_a_pattern_that_backtracks_costs_the_text_alone(folder):
    def change(fields):
        fields["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a+)+$|[^a]+"

    edit(folder / TOKENIZER, change)
    builder = make_builder(folder)
    assert builder.context_tokens("bcd").size
    with pytest.raises(Unusable, match="the tokenizer cannot read the text"):
        builder.context_tokens("a" * 60 + "b")
