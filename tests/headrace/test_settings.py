"""Settings: which source wins, what is refused, what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.settings import Settings, SettingsError, load, split_address


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "headrace.toml"
    path.write_text(text)
    return str(path)


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(tmp_path: Path) -> None:
    """Each layer hides the one below it, key by key."""
    config = write(tmp_path, "prefill = 5\ndecode = 5\nboth = 5\n")
    env = {"HEADRACE_PREFILL": "6", "HEADRACE_DECODE": "6"}

    loaded = load({"prefill": 7}, config=config, environ=env)

    assert (loaded.settings.prefill, loaded.settings.decode, loaded.settings.both) == (7, 6, 5)
    assert loaded.settings.max_running == Settings.model_fields["max_running"].default


def test_every_value_names_its_source(tmp_path: Path) -> None:
    """`headrace config` can say why a value holds."""
    config = write(tmp_path, "both = 1\n")

    loaded = load({"prefill": 2}, config=config, environ={"HEADRACE_DECODE": "3"})

    assert loaded.sources["prefill"] == "flag --prefill"
    assert loaded.sources["decode"] == "env HEADRACE_DECODE"
    assert loaded.sources["both"] == f"file {config}"
    assert loaded.sources["engine"] == "default"
    assert set(loaded.sources) == set(Settings.model_fields)


def test_a_flag_that_was_not_given_hides_nothing() -> None:
    """None on the command line means absent."""
    loaded = load({"decode": None}, environ={"HEADRACE_DECODE": "4"})

    assert loaded.settings.decode == 4


@pytest.mark.parametrize("layer", ["flag", "env", "file"])
def test_an_unknown_key_is_fatal_and_names_its_source(layer: str, tmp_path: Path) -> None:
    """A misspelt setting never passes in silence, wherever it stands."""
    config = write(tmp_path, "decod = 2\n" if layer == "file" else "")
    env = {"HEADRACE_DECOD": "2"} if layer == "env" else {}
    flags = {"decod": 2} if layer == "flag" else {}
    where = {"flag": "flag --decod", "env": "env HEADRACE_DECOD", "file": f"file {config}"}[layer]

    with pytest.raises(SettingsError) as caught:
        load(flags, config=config, environ=env)

    assert "unknown setting 'decod'" in str(caught.value)
    assert where in str(caught.value)
    assert "'decode'" in str(caught.value)


def test_all_problems_are_told_at_once() -> None:
    """Two mistakes need one run to be found."""
    with pytest.raises(SettingsError) as caught:
        load({}, environ={"HEADRACE_DECODE": "many", "HEADRACE_HTTP": "here"})

    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decode", "-1"),
        ("engine", "magic"),
        ("engine", "torch:x"),
        ("http", "127.0.0.1"),
        ("http", "127.0.0.1:99999"),
        ("bus_url", "http://127.0.0.1:4222"),
        ("instance", "Not A Name"),
        ("log_level", "loud"),
        ("drain_limit_s", "-1"),
        ("port_base", "70000"),
    ],
)
def test_a_bad_value_is_fatal_and_names_setting_and_source(name: str, value: str) -> None:
    """The message leads to the place that has to change."""
    with pytest.raises(SettingsError) as caught:
        load({}, environ={f"HEADRACE_{name.upper()}": value})

    assert f"{name} (env HEADRACE_{name.upper()})" in str(caught.value)


def test_nothing_that_could_answer_is_refused() -> None:
    """An instance without an engine that decodes is a mistake."""
    with pytest.raises(SettingsError, match="nothing could answer"):
        load({"decode": 0, "both": 0}, environ={})


def test_a_missing_settings_file_that_was_named_is_fatal(tmp_path: Path) -> None:
    """Only the default file may be absent."""
    with pytest.raises(SettingsError, match="does not exist"):
        load({}, config=str(tmp_path / "none.toml"), environ={})


def test_a_settings_file_that_is_no_toml_is_fatal(tmp_path: Path) -> None:
    """The parser's words reach the reader."""
    with pytest.raises(SettingsError, match="cannot be read"):
        load({}, config=write(tmp_path, "= broken"), environ={})


def test_secrets_are_masked_in_rows_and_in_repr() -> None:
    """A token is used, and never shown."""
    loaded = load({}, environ={"HEADRACE_BUS_TOKEN": "t0k3n-secret", "HEADRACE_BUS_PASSWORD": "p4ss-secret"})

    shown = repr(loaded.rows()) + repr(loaded.settings)

    assert "secret" not in shown.replace("SecretStr", "").lower()
    assert loaded.settings.bus_token is not None
    assert loaded.settings.bus_token.get_secret_value() == "t0k3n-secret"


def test_a_child_gets_the_very_same_settings_through_its_environment(tmp_path: Path) -> None:
    """What the parent merged, flags and file included, the child reads back."""
    config = write(tmp_path, "pool_tokens = 512\n")
    flags = {"decode": 3, "isolate": True, "bus_token": "x"}
    parent = load(flags, config=config, environ={"HEADRACE_DTYPE": "float32"})

    child = load({}, environ=parent.to_env())

    assert child.settings == parent.settings


def test_port_base_moves_the_http_port_unless_one_is_given() -> None:
    """An explicit address is taken at its word."""
    moved = load({"port_base": 9100}, environ={}).settings
    explicit = load({"port_base": 9100, "http": "127.0.0.1:8123"}, environ={}).settings

    assert moved.http_address == ("127.0.0.1", 9100)
    assert explicit.http_address == ("127.0.0.1", 8123)


def test_an_ipv6_host_stands_in_brackets() -> None:
    """The last colon separates the port."""
    assert split_address("[::1]:8000") == ("::1", 8000)


def test_a_draft_model_is_named_exactly_when_it_is_wanted() -> None:
    """The choice and the path belong together."""
    for flags in ({"speculation": "draft-model"}, {"draft_model": "/small.gguf"}):
        with pytest.raises(SettingsError, match="belong together"):
            load(flags, environ={})

    loaded = load({"speculation": "draft-model", "draft_model": "/small.gguf"}, environ={})

    assert loaded.settings.draft_model == "/small.gguf"


def test_a_format_of_keys_and_values_needs_an_engine_that_rounds() -> None:
    """Scripted engines keep no KV, and float32 is for exact comparisons."""
    assert load({"kv_format": "int8"}, environ={}).settings.kv_format == "int8"
    assert load({"kv_format": "fp8", "engine": "torch"}, environ={}).settings.kv_format == "fp8"
    for other in ({"engine": "scripted"}, {"engine": "torch", "dtype": "float32"}):
        with pytest.raises(SettingsError, match="kv_format"):
            load({"kv_format": "int8", **other}, environ={})
    with pytest.raises(SettingsError, match="kv_format"):
        load({"kv_format": "int4"}, environ={})


def test_limits_of_single_tenants_come_from_the_file_or_the_environment(tmp_path: Path) -> None:
    """And reach child processes as they are."""
    config = write(tmp_path, "kv_tenant_bytes = 5\n[kv_tenants.acme]\nhost = 10\ndisk = 0\n")

    loaded = load({}, config=config, environ={})

    assert loaded.settings.kv_tenants == {"acme": {"host": 10, "disk": 0}}
    assert load({}, environ=loaded.to_env()).settings == loaded.settings


@pytest.mark.parametrize("text", ["{", "3", '{"acme": 3}', '{"acme": {"host": -1}}', '{"acme": {"gpu": 1}}'])
def test_bad_limits_are_refused_with_their_source(text: str) -> None:
    """Not JSON, no object, negative, a tier that is none."""
    with pytest.raises(SettingsError) as caught:
        load({}, environ={"HEADRACE_KV_TENANTS": text})

    assert "kv_tenants (env HEADRACE_KV_TENANTS)" in str(caught.value)


def test_stored_kv_is_always_verified_where_a_model_answers() -> None:
    """Switching it off takes a value that says what happens, and an engine without a model."""
    off = "off-and-serve-wrong-bytes"
    assert load({}, environ={}).settings.kv_verify == "on"
    assert load({"kv_verify": off, "engine": "scripted"}, environ={}).settings.kv_verify == off
    for engine in ("auto", "native", "torch"):
        with pytest.raises(SettingsError, match="kv_verify"):
            load({"kv_verify": off, "engine": engine}, environ={})
    for value in ("off", "false", "0", ""):
        with pytest.raises(SettingsError, match="kv_verify"):
            load({"engine": "scripted"}, environ={"HEADRACE_KV_VERIFY": value})


def test_what_only_scripts_and_comparisons_read_is_no_unknown_setting() -> None:
    """Whoever exported the place of the peers for a comparison can start the product in the same shell."""
    env = {"HEADRACE_PEERS": "/opt/peers", "HEADRACE_PEERS_ONLY": "llama", "HEADRACE_PEERS_MODEL": "/opt/model.gguf"}

    loaded = load({}, environ=env | {"HEADRACE_DECODE": "3"})

    assert loaded.settings.decode == 3
    with pytest.raises(SettingsError, match="peer'"):
        load({}, environ={"HEADRACE_PEER": "/opt/peers"})
