"""Files of unknown origin: what they hold, what they look like, and what is refused."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from spot_batch.drafters.order import OrderConfig, OrderModel, save_order
from spot_batch.lab.foreign.files import looks_like, open_foreign

SMALL = OrderConfig(block_length=8, num_layers=2, hidden_size=16, num_heads=2)


class Spotlike(nn.Module):
    """An order transformer under somebody else's names."""

    def __init__(self, *, vocab_size: int = 0, feed_forward: int = 48) -> None:
        super().__init__()
        self.inp = nn.Linear(36, 16)
        self.pos = nn.Embedding(8, 16)
        self.slot = nn.Embedding(3, 16)
        layer = nn.TransformerEncoderLayer(
            16, 2, feed_forward, 0.0, activation="gelu", norm_first=True, batch_first=True
        )
        self.enc = nn.TransformerEncoder(layer, 3, nn.LayerNorm(16), enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))
        if vocab_size:
            self.pca = nn.Linear(12, vocab_size, bias=False)

    def forward(self, features: Tensor, status: Tensor) -> Tensor:
        x = self.inp(features) + self.pos.weight + self.slot(status)
        score: Tensor = self.head(self.enc(x)).squeeze(2)
        return score


class Runs:
    """Unpickled, it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> object:
        return os.system, (self.command,)


def write_zip(path: Path, entries: Mapping[str, bytes], *, packed: bool = False) -> Path:
    how = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


def test_our_own_drafter_is_known_and_loads_as_it_is(tmp_path: Path) -> None:
    save_order(OrderModel(SMALL), tmp_path / "mine", {"name": "mine"})
    file = open_foreign(tmp_path / "mine.safetensors")
    looks = looks_like(file)
    assert (looks.kind, looks.refusal) == ("order", "")
    assert (looks.num_layers, looks.hidden_size, looks.block_length) == (2, 16, 8)
    assert (looks.feed_forward, looks.num_features) == (64, 36)
    assert looks.num_parameters == sum(p.numel() for p in OrderModel(SMALL).parameters())


def test_without_its_card_it_is_said_why_it_does_not_load(tmp_path: Path) -> None:
    save_order(OrderModel(SMALL), tmp_path / "mine", {})
    (tmp_path / "mine.json").unlink()
    looks = looks_like(open_foreign(tmp_path / "mine.safetensors"))
    assert (looks.kind, looks.refusal) == ("order", "mine.json is not beside it")


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".safetensors"])
def test_an_order_transformer_is_told_by_its_layers_widths_and_block(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"spot{suffix}"
    tensors = {name: t.contiguous() for name, t in Spotlike().state_dict().items()}
    if suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    looks = looks_like(open_foreign(path))
    assert looks.kind == "order-like transformer"
    assert (looks.num_layers, looks.hidden_size, looks.feed_forward) == (3, 16, 48)
    assert (looks.num_features, looks.block_length) == (36, 8)
    assert looks.refusal


def test_matrices_as_long_as_a_vocabulary_are_named(tmp_path: Path) -> None:
    torch.save(Spotlike(vocab_size=900).state_dict(), tmp_path / "sets.pt")
    looks = looks_like(open_foreign(tmp_path / "sets.pt"))
    assert looks.kind == "transformer with a vocabulary"
    assert looks.vocabulary == ("pca.weight",)


def test_tensors_of_no_known_kind_are_unknown(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 4)}, tmp_path / "x.safetensors", metadata={"by": "me"})
    file = open_foreign(tmp_path / "x.safetensors")
    assert looks_like(file).kind == "unknown"
    assert file.metadata == {"by": "me"}
    assert (file["a"].shape, file["a"].dtype, file["a"].num_parameters) == ((3, 4), "float32", 12)


def test_no_tensor_at_all_is_unknown(tmp_path: Path) -> None:
    torch.save({"note": "empty"}, tmp_path / "x.pt")
    file = open_foreign(tmp_path / "x.pt")
    assert file.tensors == ()
    assert looks_like(file).kind == "unknown"


def test_nested_checkpoints_have_dotted_names_and_the_rest_is_metadata(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    tree = {"model": {"w": weight}, "args": {"layers": [3, 4]}, "acc": 0.75}
    torch.save(tree, tmp_path / "x.pt")
    file = open_foreign(tmp_path / "x.pt")
    assert [tensor.name for tensor in file.tensors] == ["model.w"]
    assert file.metadata == {"args.layers.0": "3", "args.layers.1": "4", "acc": "0.75"}
    assert torch.equal(file.load("model.w"), weight)


def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    torch.save({"w": torch.zeros(2), "x": Runs(f"touch {ran}")}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"x\.pt: refused, its pickle wants to run or build posix"):
        open_foreign(tmp_path / "x.pt")
    assert not ran.exists()


def test_a_larger_file_than_asked_for_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1000)}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="more than the 2,000 of --max-bytes"):
        open_foreign(tmp_path / "x.pt", max_bytes=2_000)


def test_a_zip_that_unpacks_to_more_than_asked_for_is_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.pt", {"x/data/0": bytes(10**6)}, packed=True)
    with pytest.raises(ValueError, match="1,000,000 bytes unpacked, more than the 10,000"):
        open_foreign(path, max_bytes=10_000)


def test_packed_entries_are_refused_whatever_their_size(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.pt", {"x/data.pkl": bytes(10**4)}, packed=True)
    with pytest.raises(ValueError, match="its entries are compressed"):
        open_foreign(path)


def test_a_zip_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.pt", {"readme.txt": b"hello"})
    with pytest.raises(ValueError, match=r"x\.pt: not a whole torch file"):
        open_foreign(path)


def test_the_format_before_zip_archives_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"torch has written zip archives since version 1\.6"):
        open_foreign(tmp_path / "x.pt")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("kept", [0.0, 0.05, 0.5, 0.99])
def test_a_truncated_file_is_refused_in_one_sentence(
    tmp_path: Path, suffix: str, kept: float
) -> None:
    path = tmp_path / f"x{suffix}"
    tensors: dict[str, Tensor] = {"w": torch.zeros(500)}
    if suffix == ".pt":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(ValueError, match="not a whole") as raised:
        open_foreign(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_damaged_bytes_are_refused_or_read_never_a_crash(tmp_path: Path, suffix: str) -> None:
    whole, path = tmp_path / f"whole{suffix}", tmp_path / f"x{suffix}"
    if suffix == ".pt":
        torch.save({"model": {"w": torch.zeros(4), "b": torch.zeros(2)}, "n": 3}, whole)
    else:
        save_file({"w": torch.zeros(4), "b": torch.zeros(2)}, whole)
    data = whole.read_bytes()
    for at in range(0, min(len(data), 1200), 3):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        try:
            file = open_foreign(path)
        except ValueError as error:
            assert str(error).startswith(str(path))  # noqa: PT017 - either outcome will do
        else:
            looks_like(file)


def test_a_checkpoint_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    tree: object = 1
    for _ in range(40):
        tree = {"a": tree}
    torch.save(tree, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="nested too deeply"):
        open_foreign(tmp_path / "x.pt")


def test_lists_that_hold_one_another_many_times_are_refused(tmp_path: Path) -> None:
    tree: list[object] = [1]
    for _ in range(12):
        tree = [tree] * 10
    torch.save(tree, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="of too many values"):
        open_foreign(tmp_path / "x.pt")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"want a \.safetensors, \.pt, \.pth or \.bin file"):
        open_foreign(tmp_path / "x.npz")
