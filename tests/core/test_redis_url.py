from pathlib import Path

import pytest

from weir.core.errors import ConfigError
from weir.core.redis_url import Address, RedisKind, RedisUrl, mask_passwords


def test_plain_url_has_the_default_port_and_database() -> None:
    url = RedisUrl.parse("redis://cache")
    assert (url.kind, url.addresses, url.db) == (RedisKind.STANDALONE, (Address("cache", 6379),), 0)
    assert url.username is None
    assert url.password is None


def test_login_and_database_are_percent_decoded() -> None:
    url = RedisUrl.parse("redis://ann:p%40ss%2Fword@cache:7000/3")
    assert (url.username, url.password, url.db, url.addresses) == ("ann", "p@ss/word", 3, (Address("cache", 7000),))


def test_tls_url_takes_a_certificate_authority(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    url = RedisUrl.parse(f"rediss://cache?ca={tmp_path}/ca.pem")
    assert url.is_tls
    assert url.ca_file == tmp_path / "ca.pem"
    assert RedisUrl.parse("rediss://cache").ca_file is None


def test_unix_url_names_a_socket() -> None:
    url = RedisUrl.parse("unix://:secret@/run/redis.sock?db=2")
    assert (url.socket_path, url.db, url.password, url.addresses) == ("/run/redis.sock", 2, "secret", ())


def test_sentinel_url_lists_sentinels_service_and_database() -> None:
    url = RedisUrl.parse("redis+sentinel://u:p@s1:1,s2,[::1]:3/weir/5?sentinel_password=q")
    assert url.kind is RedisKind.SENTINEL
    assert url.addresses == (Address("s1", 1), Address("s2", 26379), Address("::1", 3))
    assert (url.service, url.db, url.username, url.password, url.sentinel_password) == ("weir", 5, "u", "p", "q")


def test_cluster_url_lists_nodes() -> None:
    url = RedisUrl.parse("redis+cluster://h1:1,h2:2")
    assert (url.kind, url.addresses) == (RedisKind.CLUSTER, (Address("h1", 1), Address("h2", 2)))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("localhost:6379", "starts with none of redis://"),
        ("http://cache", "starts with none of redis://"),
        ("redis://", "names no host"),
        ("redis://cache:99999", "port 99999"),
        ("redis://cache:0", "port 0"),
        ("redis://a:1:2", "not host:port"),
        ("redis://a,b", "more than one server"),
        ("redis://cache/zero", "must be a number"),
        ("redis://cache?ca=/x", "option 'ca' is not known for redis://"),
        ("rediss://cache?ca=/nowhere/ca.pem", "'/nowhere/ca.pem' is not a file"),
        ("rediss://cache?verify=no", "option 'verify' is not known"),
        ("unix://host/run/redis.sock", "three slashes"),
        ("unix://", "three slashes"),
        ("redis+sentinel://s1", "names no service"),
        ("redis+cluster://h1/1", "only database 0"),
    ],
)
def test_wrong_url_is_refused_by_name(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        RedisUrl.parse(text)
    assert complaint in refusal.value.message
    assert repr(text) in refusal.value.message
    assert refusal.value.param == "redis_url"


@pytest.mark.parametrize(
    "text",
    [
        "redis://ann:hunter2@cache:bad",
        "redis://:hunter2@cache:bad",
        "redis://:hunter2/with@slash@cache:bad",
        "redis://ann:1/hunter2@cache",
        "redis+sentinel://ann:hunter2@s1?sentinel_password=hunter2&x=1",
        "nonsense://ann:hunter2@cache",
    ],
)
def test_no_password_leaves_in_an_error_or_a_log(text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        RedisUrl.parse(text)
    assert "hunter2" not in refusal.value.message
    assert refusal.value.__cause__ is None
    assert "hunter2" not in repr(RedisUrl.parse("redis://ann:hunter2@cache"))
    assert mask_passwords("redis://ann:hunter2@cache/1") == "redis://ann:***@cache/1"
