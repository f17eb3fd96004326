"""`rankscope verify` on arrays and numbers of numpy in files of `torch.save`."""

import numpy as np
import pytest
import torch


class Typed:
    """An array of numpy of which the type is changed after it was made."""

    def __init__(self, code, octets, state):
        self.code, self.octets, self.state = code, octets, state

    def save(self, path):
        def text(value):
            octets = value.encode()
            return b"X" + len(octets).to_bytes(4, "little") + octets

        def number(value):
            return b"J" + value.to_bytes(4, "little", signed=True)

        kind = b"cnumpy\ndtype\n" + text(self.code) + b"\x89\x88\x87Rq\x00"

        def encoded(value):
            # As protocol 2 writes bytes, which has no opcode for them.
            return b"c_codecs\nencode\n" + text(value) + text("latin1") + b"\x86R"

        octets = encoded(self.octets)
        made = {
            "called": b"cnumpy\nndarray\n" + number(1) + b"\x85h\x00" + octets + b"\x87R",
            "built": b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
            + number(0)
            + b"\x85"
            + encoded("b")
            + b"\x87R("
            + number(1)
            + number(1)
            + b"\x85h\x00\x89"
            + octets
            + b"tb",
        }[self.state]
        # The state of a type of 60 bytes, where its elements have 8.
        changed = b"h\x00(" + number(3) + text("|") + b"NNN" + number(60) + number(1) + number(0)
        pickled = b"\x80\x02](" + kind + made + changed + b"tbe."
        writer = torch._C.PyTorchFileWriter(str(path))
        writer.write_record("data.pkl", pickled, len(pickled))
        writer.write_record("byteorder", b"little", 6)
        writer.write_end_of_file()
        return str(path)


@pytest.mark.parametrize("code", ["S8", "i8"])
@pytest.mark.parametrize("how", ["called", "built"])
def test_an_array_is_never_read_beyond_its_bytes(saved, verify, tmp_path, code, how):
    evil = Typed(code, "A" * 8, how).save(tmp_path / "evil.pt")
    plain = np.frombuffer(b"A" * 8, code)
    kind = np.dtype(code)
    found, text, _, complaint = verify(evil, saved("a.pt", [kind, plain, kind]))
    # To call numpy's constructor is refused; the state of a type gives no more than byte order.
    assert found == (2 if how == "called" else 0), text
    assert ("evil.pt" in complaint) is (how == "called")
    assert np.dtype("i8").itemsize == 8


@pytest.mark.parametrize(
    "array", [np.array([None, 1], dtype=object), np.array(["2026-01-01"], "M8[D]")]
)
def test_arrays_of_what_is_no_number_are_not_read(saved, verify, array):
    path = saved("a.pt", {"x": array})
    code, _, _, complaint = verify(path, path)
    assert code == 2
    assert "numpy" in complaint


def test_arrays_of_every_type_read_as_they_were_saved(saved, verify, tmp_path):
    arrays = {
        code: np.arange(6).reshape(2, 3).astype(code)
        for code in ("?", "i1", "u2", ">i4", "u8", "f2", ">f8", "c8", "c16", "S3", "U3", ">U2")
    }
    arrays |= {"columns": np.asfortranarray(arrays["i1"]), "none": np.empty((0, 3), "f4")}
    scalars = {
        "float": np.float32(2.5),
        "integer": np.int64(7),
        "long": np.longdouble(2.5),
        "longs": np.ones(2, np.longdouble),
        "texts": np.empty((2, 0), "U3"),
        "type": np.dtype("f4"),
        np.dtype("f4"): 1,
    }
    first = saved("a.pt", {"arrays": arrays, **scalars})
    tensors = {
        code: torch.from_numpy(np.ascontiguousarray(one).astype(one.dtype.newbyteorder("=")))
        if one.dtype.kind not in "SU"
        else one
        for code, one in arrays.items()
    }
    assert verify(first, saved("b.pt", {"arrays": tensors, **scalars}))[0] == 0
    for code, one in arrays.items():
        if one.size:
            other = one.copy()
            other[1, 2] = "9" if one.dtype.kind in "SU" else not one[1, 2]
            changed = saved("b.pt", {"arrays": {**arrays, code: other}, **scalars})
            (group,) = verify(first, changed)[2]["groups"]
            assert [d["name"] for d in group["differences"]] == [f"arrays.{code}"]
