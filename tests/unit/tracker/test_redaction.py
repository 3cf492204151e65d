"""Trackers receive a run's configuration without its secrets."""

from __future__ import annotations

from services.tracker.redaction import HIDDEN, flat, without_secrets


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


def test_flat_configuration_has_dotted_keys() -> None:
    assert flat({"a": {"b": [1, 2], "c": None}, "d": [{"e": "x"}]}) == {"a.b": "[1, 2]", "d.0.e": "x"}
