"""`save_state` and `load_state`: a state comes back bit for bit, with its layer and config, or not at all."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from csa2_compiled import (
    CheckpointError,
    CSA2Cache,
    CSA2Config,
    CSA2ForCausalLM,
    CSA2InputError,
    CSA2State,
    load_state,
    save_state,
)
from csa2_compiled.rows import read_rows

CONFIG = CSA2Config.tiny()  # ratios 0 0 2 2 2 1 1 1 1, sources 2, 5 and 7 (reindex), candidates of 5
FIELDS = ("compressed_kv", "index_keys", "topk_indices", "candidates")


def states_of(num_tokens, dtype=torch.float32, cache=None):
    """The state after each layer, 2 rows."""
    torch.manual_seed(0)
    model, states = CSA2ForCausalLM(CONFIG, dtype=dtype).eval(), []

    def run_block(block, *inputs):
        output = block(*inputs)
        states.append(output.state)
        return output

    with torch.no_grad():
        model(torch.randint(256, (2, num_tokens)), cache, run_block=run_block)
    return states


@pytest.fixture(scope="module")
def states():
    return states_of(40)


def assert_same(came, state):
    assert [p.compress_ratio for p in came.publications] == [p.compress_ratio for p in state.publications]
    for one, other in zip(came.publications, state.publications, strict=True):
        for field in FIELDS:
            a, b = getattr(one, field), getattr(other, field)
            assert (a is None) == (b is None)
            if b is not None:
                b = read_rows(b)
                assert a.dtype == b.dtype
                assert torch.equal(a, b)


@pytest.mark.parametrize(("num_tokens", "dtype"), [(40, torch.float32), (1, torch.float32), (9, torch.bfloat16)])
def test_every_state_comes_back_bit_for_bit(num_tokens, dtype, tmp_path):
    for layer, state in enumerate(states_of(num_tokens, dtype)):
        save_state(state, tmp_path / "state", CONFIG, layer)  # the older one is replaced
        saved = load_state(tmp_path / "state")
        assert (saved.cfg, saved.layer_idx) == (CONFIG, layer)
        assert_same(saved.state, state)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_loaded_state_goes_on_as_the_one_that_was_saved(states, tmp_path):
    save_state(states[6], tmp_path / "state", CONFIG, 6)
    torch.manual_seed(0)
    layer, x = CSA2ForCausalLM(CONFIG).layers[7].attn, torch.randn(2, 40, CONFIG.hidden_size)
    with torch.no_grad():
        expected = layer(x, states[6])
        came = layer(x, load_state(tmp_path / "state").state)
    assert torch.equal(came.hidden_states, expected.hidden_states)
    assert_same(came.state, expected.state)


def test_packed_rows_come_back_as_their_values(tmp_path):
    state = states_of(11, cache=CSA2Cache(CONFIG, 2, 16, packed=True))[8]
    save_state(state, tmp_path / "state", CONFIG, 8)
    assert_same(load_state(tmp_path / "state").state, state)


def test_the_file_says_what_it_is(states, tmp_path):
    save_state(states[8], tmp_path / "state", CONFIG, 8)
    with safe_open(tmp_path / "state", framework="pt") as file:
        metadata, names = file.metadata(), set(file.keys())
    assert (metadata["format"], metadata["layer_idx"]) == ("csa2-state-1", "8")
    assert CSA2Config.from_json(json.loads(metadata["config"])) == CONFIG
    assert names == {f"ratio.{r}.{field}" for r in (1, 2) for field in FIELDS} - {"ratio.2.candidates"}


@pytest.mark.parametrize("at", [0, 8, 60, 400, 0.3, 0.7, -1])
def test_one_changed_byte_is_refused(states, tmp_path, at):
    path = tmp_path / "state"
    save_state(states[8], path, CONFIG, 8)
    data = bytearray(path.read_bytes())
    data[int(at * len(data)) if isinstance(at, float) else at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="state"):
        load_state(path)


def test_what_is_no_whole_state_file_is_refused(states, tmp_path):
    path = tmp_path / "state"
    save_state(states[8], path, CONFIG, 8)
    whole = path.read_bytes()
    for length in (0, 7, 300, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cannot be read.*allowed is"):
            load_state(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_state(tmp_path / "none")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_state(tmp_path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match=r"format None.*csa2-state-1"):
        load_state(path)


def test_a_tensor_of_another_file_is_refused(states, tmp_path):
    path = tmp_path / "state"
    save_state(states[8], path, CONFIG, 8)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["ratio.1.topk_indices"] = tensors["ratio.1.topk_indices"].flip(1).contiguous()
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(CheckpointError, match="is damaged: its SHA-256"):
        load_state(path)


BAD = {
    "no state": (lambda s: s[8].publications, 8, "state is a tuple; it must be a CSA2State"),
    "layer": (lambda s: s[8], 9, "layer_idx is 9; it must be an integer from 0 to 8"),
    "no layer": (lambda s: s[8], True, "layer_idx is True"),
    "empty": (lambda s: CSA2State(), 8, r"compress ratios \[\]; after layer 8 of this config \[1, 2\] is allowed"),
    "of a later layer": (lambda s: s[5], 4, r"compress ratios \[1, 2\]; after layer 4 of this config \[2\]"),
    "order": (lambda s: CSA2State(s[8].publications[::-1]), 8, r"compress ratios \[2, 1\]"),
    "candidates": (
        lambda s: CSA2State((replace(s[8].publications[0], candidates=None), s[8].publications[1])),
        8,
        r"ratio.1.candidates of shape None; \(2, 40, 40\) is allowed",
    ),
    "position": (
        lambda s: s[4].publish(replace(s[4].publications[0], topk_indices=s[4].publications[0].topk_indices + 20)),
        4,
        r"topk_indices of torch.int32; int32 from -1 to 19",
    ),
    "dtype": (
        lambda s: s[4].publish(replace(s[4].publications[0], topk_indices=s[4].publications[0].topk_indices.long())),
        4,
        r"topk_indices of torch.int64; int32",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_state_that_the_layer_does_not_return_is_not_written(states, tmp_path, case):
    make, layer, words = BAD[case]
    (tmp_path / "state").write_text("older", encoding="utf-8")
    with pytest.raises(CSA2InputError, match=words):
        save_state(make(states), tmp_path / "state", CONFIG, layer)
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == {"state": "older"}


def test_a_failure_leaves_the_older_file(states, tmp_path, monkeypatch):
    path = tmp_path / "state"
    save_state(states[4], path, CONFIG, 4)
    before = path.read_bytes()

    def fails(tensors, target, metadata):
        target.write_bytes(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr("csa2_compiled.state_files.save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        save_state(states[8], path, CONFIG, 8)
    assert path.read_bytes() == before
    assert [left.name for left in tmp_path.iterdir()] == ["state"]
