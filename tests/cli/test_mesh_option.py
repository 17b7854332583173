"""The value of --mesh."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtorch.cli.errors import InputError
from dtorch.cli.mesh_option import MAX_DEVICES, MeshShape, parse_mesh


def test_axes_keep_their_order() -> None:
    shape = parse_mesh("dp=2, tp=3")
    assert shape == MeshShape(("dp", "tp"), (2, 3))
    assert shape.num_devices == 6
    assert str(shape) == "dp=2,tp=3"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "'' is not an axis"),
        ("dp", "'dp' is not an axis; write name=size"),
        ("dp=", "'dp=' is not an axis"),
        ("dp=two", "'dp=two' is not an axis"),
        ("dp=-2", "'dp=-2' is not an axis"),
        ("dp=2.5", "'dp=2.5' is not an axis"),
        ("dp=\N{FULLWIDTH DIGIT TWO}", "is not an axis"),
        ("2=dp", "'2=dp' is not an axis"),
        ("dp=2,", "'' is not an axis"),
        ("dp=2;tp=2", "'dp=2;tp=2' is not an axis"),
        ("dp=0", "axis 'dp' has no devices"),
        ("dp=2,dp=2", "axis 'dp' is there twice"),
        ("dp=40,tp=40", "asks for 1600 devices"),
        ("dp=999999999", "asks for 999999999 devices"),
    ],
)
def test_nonsense_is_named(text: str, complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_mesh(text)
    assert complaint in caught.value.message
    assert repr(text) in caught.value.message


@given(st.text(alphabet="dtp_=,0123 -é", max_size=12))
def test_any_text_is_a_mesh_or_refused(text: str) -> None:
    try:
        shape = parse_mesh(text)
    except InputError:
        return
    assert 1 <= shape.num_devices <= MAX_DEVICES
    assert parse_mesh(str(shape)) == shape
