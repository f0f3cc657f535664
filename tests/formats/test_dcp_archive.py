import io
import zipfile
import zlib

import pytest
import torch

from ckptool.core.dtypes import ITEMSIZE_BYTES
from ckptool.formats.dcp_archive import archive_template


def archive_of(tensor: torch.Tensor) -> bytes:
    payload = bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    template = archive_template(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    return template.prefix + payload + template.suffix_with(zlib.crc32(payload))


@pytest.mark.parametrize("dtype", [d for d in ITEMSIZE_BYTES if hasattr(torch, d) and d != "float4_e2m1fn_x2"])
def test_torch_loads_it_as_its_own(dtype: str) -> None:
    tensor = torch.randint(0, 2, (3, 5), dtype=torch.uint8).to(getattr(torch, dtype))
    loaded = torch.load(io.BytesIO(archive_of(tensor)), weights_only=True)
    assert loaded.dtype == tensor.dtype and loaded.shape == tensor.shape
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (1,), (63,), (2, 3, 4), (1 << 16,)])
def test_only_the_fingerprint_differs_from_torch_save(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    archive_of(torch.randn(shape))
    theirs = io.BytesIO()
    ours = archive_of(tensor)
    torch.save(tensor, theirs)
    assert len(ours) == len(theirs.getvalue())
    with zipfile.ZipFile(io.BytesIO(ours)) as a, zipfile.ZipFile(theirs) as b:
        assert a.testzip() is None
        assert a.namelist() == b.namelist()
        for name in a.namelist():
            if not name.endswith("serialization_id"):
                assert a.read(name) == b.read(name), name


def test_the_checksum_is_the_payloads() -> None:
    raw = bytearray(archive_of(torch.arange(100)))
    raw[raw.index(torch.arange(100).numpy().tobytes()) + 50] ^= 1
    with zipfile.ZipFile(io.BytesIO(bytes(raw))) as archive:
        assert archive.testzip() == "archive/data/0"
