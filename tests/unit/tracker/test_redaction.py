"""Trackers receive a run's configuration without its secrets."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tracker.redaction import HIDDEN, flat, without_secrets

VALUE = "hunter2-of-the-run"
ENDS = (
    ["api", "key"],
    ["token"],
    ["access", "token"],
    ["client", "secret"],
    ["password"],
    ["pwd"],
    ["cookie"],
    ["auth"],
)
STYLES = (
    "_".join,
    "-".join,
    ".".join,
    lambda words: "_".join(words).upper(),
    lambda words: words[0] + "".join(word.title() for word in words[1:]),
    lambda words: "".join(word.title() for word in words),
)


def test_text_below_keys_named_like_secrets_is_hidden() -> None:
    found = without_secrets(
        {
            "reward": {"params": {"api_key": "sk-1", "judge-token": "t", "nested": {"PASSWORD": "p"}, "model": "m"}},
            "monitor": {"web": {"token": "abc"}},
            "credentials": {"user": "u", "list": ["x"]},
        }
    )
    assert found == {
        "reward": {"params": {"api_key": HIDDEN, "judge-token": HIDDEN, "nested": {"PASSWORD": HIDDEN}, "model": "m"}},
        "monitor": {"web": {"token": HIDDEN}},
        "credentials": {"user": HIDDEN, "list": [HIDDEN]},
    }


def test_credentials_in_urls_are_hidden() -> None:
    urls = ["https://user:pw@host/x", "http://host:1/?write_token=abc&b=1", "http://host/plain"]
    assert without_secrets({"urls": urls})["urls"] == [
        f"https://{HIDDEN}@host/x",
        f"http://host:1/?write_token={HIDDEN}&b=1",
        "http://host/plain",
    ]


def test_numbers_and_keys_with_similar_names_are_not_hidden() -> None:
    kept = {"sampling": {"max_new_tokens": 8}, "algorithm": {"loss": {"aggregation": "token_mean"}}, "keys": 1}
    assert without_secrets(kept) == kept


@pytest.mark.parametrize(
    "name", ["accessToken", "clientSecret", "openaiApiKey", "pwd", "cookie", "HFToken", "OPENAI_APIKEY", "X-Api-Key"]
)
def test_names_of_secrets_are_recognized_however_they_are_written(name: str) -> None:
    assert without_secrets({name: VALUE, "list": [{name: [VALUE]}]}) == {name: HIDDEN, "list": [{name: [HIDDEN]}]}


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer a1",
        "authorization: Basic dXNlcjpwdw==",
        "Cookie: session=1; theme=dark",
        "--api-key=a1 --model=m",
        "curl -H 'X-Api-Key: a1' http://host",
        "sk-proj-abcdefghijklmnopqrst",
        "hf_abcdefghijklmnopqrst",
        "ghp_abcdefghijklmnopqrst",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_texts_that_look_like_secrets_are_hidden_in_any_place(text: str) -> None:
    shown = json.dumps(without_secrets({"headers": [text], "engine_args": {"x": text}}))
    assert HIDDEN in shown
    for secret in ("a1", "dXNl", "session", "abcdefgh", "IOSFODNN", "eyJ", "MIIE"):
        assert secret not in shown


@settings(max_examples=300, deadline=None)
@given(
    before=st.lists(st.sampled_from(["judge", "open", "run", "my", "v"]), max_size=3),
    words=st.sampled_from(ENDS),
    style=st.sampled_from(STYLES),
    path=st.lists(st.sampled_from(["params", "list", "headers"]), max_size=4),
)
def test_no_secret_is_shown_wherever_it_stands(
    before: list[str], words: list[str], style: object, path: list[str]
) -> None:
    value: object = {style([*before, *words]): VALUE}  # type: ignore[operator]
    for name in path:
        value = [value, 1] if name == "list" else {name: value}
    assert VALUE not in json.dumps(without_secrets(value))


@pytest.mark.parametrize(
    "text", ["the key of a store", "token_mean", "Basic training", "author: me", "tokens: 8", "http://h/?monkey=1"]
)
def test_plain_texts_are_kept(text: str) -> None:
    kept = {"what": text, "monkey": text, "tokenizer": text, "keyboard": text, "passes": text, "author": text}
    assert without_secrets(kept) == kept


def test_flat_configuration_has_dotted_keys() -> None:
    assert flat({"a": {"b": [1, 2], "c": None}, "d": [{"e": "x"}]}) == {"a.b": "[1, 2]", "d.0.e": "x"}
